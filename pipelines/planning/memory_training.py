"""The settings that decide the memory of training besides the model's shape; no torch here."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from pipelines.models.config import DecoderConfig
from pipelines.parallel.division import gathers_in_fp8, stage_layers
from pipelines.parallel.layout import Layout, Schedule, stage_count, stage_numbers
from pipelines.recipe.training_section import Adapter, Fp8Scaling, Precision

BF16, FP32 = 2, 4  # bytes of a number
Sharding = Literal["none", "optimizer", "gradients", "full"]
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)  # the index is ZeRO's stage, 0 to 3


@dataclass(frozen=True)
class Training:
    """The settings besides the model that decide the memory; sizes are in tokens and samples."""

    layout: Layout
    sharding: Sharding
    micro_batch: int
    micro_batches: int  # per step on one process
    sequence: int
    precision: Precision = "fp32"
    fp8_scaling: Fp8Scaling = "tensorwise"
    activation_checkpoint: str = "none"
    schedule: Schedule = "1f1b"
    cpu_offload: bool = False
    paged_moments: bool = False
    adapter: Adapter = field(default_factory=Adapter)
    optimizer: str = "adamw"
    sequence_parallel: bool = True  # divides activations between matrix products over tp
    async_tp: bool = False  # exchange of tensor parallelism overlaps with products
    compiled: bool = False  # `torch.compile` keeps only what the backward pass reads, and once
    reduce_dtype: str = "fp32"  # in which gradients are added up over processes
    on_cpu: bool = False  # on a CPU, RMSNorm has no fused kernel and keeps more
    ep: int = 1  # processes that divide the experts of a layer
    rank: int = 0  # the process's place in the pipeline

    @property
    def compute_bytes(self) -> int:
        """The bytes of a number in a matrix product."""
        return FP32 if self.precision in ("fp32", "tf32") else 2

    @property
    def reduce_bytes(self) -> int:
        """The bytes of a number of a gradient that is added up over processes."""
        return FP32 if self.reduce_dtype == "fp32" else 2

    @property
    def accumulates(self) -> bool:
        """Whether gradients are added up over several micro-batches."""
        return self.micro_batches > 1

    @property
    def whole_gradients_wait(self) -> bool:
        """Whether they are added up before sharding divides them (`parallel/data_parallel.py`)."""
        return self.accumulates and (self.layout.pp > 1 or not self.is_fully_sharded)

    @property
    def shards(self) -> int:
        """The number of processes over which sharding divides the state."""
        return 1 if self.sharding == "none" else self.layout.shards

    @property
    def is_fully_sharded(self) -> bool:
        """Whether FSDP2 shards the weights; see `parallel/data_parallel.py`."""
        replicas = self.layout.tp * self.layout.pp > 1 and self.layout.dp_cp > 1
        return self.sharding in ("gradients", "full") or replicas

    @property
    def gives_up_blocks(self) -> bool:
        """Whether a block's weights are gathered only while the block runs."""
        zero_bubble = self.layout.pp > 1 and self.schedule == "zero_bubble"
        return self.sharding == "full" and not zero_bubble

    @property
    def trains_all(self) -> bool:
        """Whether all weights are trained, without adapters on frozen weights."""
        return self.adapter.kind == "none"

    @property
    def has_embeddings(self) -> bool:
        """Whether the process is the pipeline's first, or there is no pipeline."""
        return self.rank == 0

    @property
    def has_head(self) -> bool:
        """Whether the process is the pipeline's last, or there is no pipeline."""
        return self.rank == self.layout.pp - 1

    @property
    def computes_again(self) -> bool:
        """Whether the backward pass computes activations of blocks again."""
        return self.activation_checkpoint != "none"

    @property
    def positions(self) -> float:
        """The token positions of a micro-batch that a process holds between matrix products."""
        return self.micro_batch * self.sequence / self.layout.tp / self.layout.cp

    @property
    def stream_copies(self) -> int:
        """The number of tensor-parallel processes that hold the same residual stream."""
        return 1 if self.sequence_parallel else self.layout.tp


def layers_by_rank(config: DecoderConfig, training: Training) -> list[int]:
    """Return the number of layers on each process of a pipeline."""
    pp, schedule = training.layout.pp, training.schedule
    if pp == 1:
        return [config.layers]
    stages = stage_layers(config, stage_count(schedule, pp))
    return [sum(len(stages[n]) for n in stage_numbers(schedule, pp, rank)) for rank in range(pp)]


def layers_of(config: DecoderConfig, training: Training) -> int:
    """Return the number of layers on the process."""
    return layers_by_rank(config, training)[training.rank]


def gathered_bytes(config: DecoderConfig, training: Training) -> int:
    """Return the bytes of a number of a block's weights that is gathered from shards."""
    in_fp8 = gathers_in_fp8(
        config,
        training.layout,
        training.precision,
        training.fp8_scaling,
        offloaded=training.cpu_offload,
    )
    return 1 if in_fp8 else training.compute_bytes
