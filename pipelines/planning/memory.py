"""How many bytes training needs on one device, by formula; no torch here.

Weights, gradients and moments after ZeRO (Rajbhandari et al. 2020) for what is implemented: AdamW
with all three in fp32. Activations after Korthikanti et al. 2022, for attention that keeps no
scores.
"""

from dataclasses import asdict, dataclass, field
from typing import Literal

from pipelines.core.recipe_training import Adapter
from pipelines.distributed.layout import Layout
from pipelines.distributed.stages import Schedule, stage_count, stage_numbers
from pipelines.models.config import DecoderConfig
from pipelines.models.division import stage_layers

HEADROOM = 0.9  # of a device's memory that tensors may take; see `Memory.margin`
FP32 = 4
MOMENTS = 8  # two of AdamW a weight
NF4 = 0.52  # QLoRA's 4 bits, with the scales of blocks of 64 quantised once more
LOGITS_AT_ONCE = 1 << 27  # `models/loss.py` computes no more
_BATCH = 8 + 8 + 4  # of a token: its id, the next one's and its document's number
_BATCHES = 17  # in use, and as many as `loading/readers.py` reads ahead
_BY_ROWS = ("o_proj", "down_proj")  # what tensor parallelism divides so
Sharding = Literal["none", "optimizer", "gradients", "full"]


@dataclass(frozen=True)
class Training:
    """What else than the model decides the memory; sizes in tokens and samples."""

    layout: Layout
    sharding: Sharding
    micro_batch: int
    micro_batches: int  # of a step on one process
    sequence: int
    precision: str = "fp32"
    activation_checkpoint: str = "none"
    schedule: Schedule = "1f1b"
    cpu_offload: bool = False
    adapter: Adapter = field(default_factory=Adapter)

    @property
    def compute_bytes(self) -> int:
        """Of a number in a matrix product."""
        return FP32 if self.precision in ("fp32", "tf32") else 2

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait, whole, for those of further micro-batches."""
        return self.micro_batches > 1

    @property
    def shards(self) -> int:
        """Processes over which the state is divided that sharding divides."""
        return 1 if self.sharding == "none" else self.layout.shards

    @property
    def is_fully_sharded(self) -> bool:
        """Whether FSDP2 has the weights; see `distributed/data_parallel.py`."""
        replicas = self.layout.tp * self.layout.pp > 1 and self.layout.dp_cp > 1
        return self.sharding in ("gradients", "full") or replicas

    @property
    def gives_up_blocks(self) -> bool:
        """Whether a block's weights are gathered for its own time only."""
        zero_bubble = self.layout.pp > 1 and self.schedule == "zero_bubble"
        return self.sharding == "full" and not zero_bubble


@dataclass(frozen=True)
class Memory:
    """Bytes on a device: each the most that any has of it, early pipeline stages as a rule.

    Attributes:
        weights: As they lie, as they are gathered and as products read them.
        gradients: Of what is trained.
        optimizer: AdamW's two moments.
        activations: What the backward pass needs of the forward pass.
        logits: And what the loss makes of them.
        buffers: For exchanges between processes, batches and tables of positions.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float

    @property
    def used(self) -> float:
        """What tensors take, in the backward pass of the last micro-batch."""
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.logits + self.buffers

    @property
    def margin(self) -> float:
        """What the allocator's fragments, the libraries and NCCL take besides."""
        return self.used * (1 / HEADROOM - 1)

    @property
    def total(self) -> float:
        """What the device must have."""
        return self.used + self.margin

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by what they are for, in the order of a table; they add up to the total."""
        return asdict(self) | {"margin": self.margin}


@dataclass(frozen=True)
class _Held:
    """Numbers of a process's part of the model, before data parallelism divides them.

    Attributes:
        whole: All.
        root: What is in no block: embeddings, last norm, head.
        block: Of one block.
    """

    whole: float
    root: float
    block: float

    @property
    def unit(self) -> float:
        """The most that FSDP2 gathers at once."""
        return max(self.root, self.block)

    @property
    def in_use(self) -> float:
        """What FSDP2 keeps gathered where blocks are given up: the root, a block and the next."""
        return min(self.whole, self.root + 2 * self.block)


def estimate(config: DecoderConfig, training: Training) -> Memory:
    """The bytes that a step needs on one device."""
    held = _held(config, training)
    if training.adapter.kind == "none":
        frozen, trained = 0.0, held
    else:
        frozen, trained = _frozen(config, held, training), _adapters(config, training)
    weights, gradients, optimizer = _state(trained, training)
    return Memory(
        weights=frozen + weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=_activations(config, training),
        logits=_logits(config, training),
        buffers=_buffers(config, training),
    )


def _held(config: DecoderConfig, training: Training) -> _Held:
    """Of the process that has most: embeddings, or head, with its layers."""
    layout, block = training.layout, config.layer_parameters
    root: float = config.parameters - config.layers * block
    if layout.pp == 1:
        whole = root + config.layers * block
        return _Held(whole / layout.tp, root / layout.tp, block / layout.tp)
    if not config.tie_embeddings:
        root /= 2  # embeddings and head lie on different stages; tied ones on both
    last = layout.pp - 1
    ends = [root if rank in (0, last) else 0.0 for rank in range(layout.pp)]
    whole = max(n * block + end for n, end in zip(_layers(config, training), ends, strict=True))
    return _Held(whole / layout.tp, root / layout.tp, block / layout.tp)


def _layers(config: DecoderConfig, training: Training) -> list[int]:
    """How many each process of a pipeline has."""
    pp, schedule = training.layout.pp, training.schedule
    if pp == 1:
        return [config.layers]
    stages = stage_layers(config, stage_count(schedule, pp))
    return [sum(len(stages[n]) for n in stage_numbers(schedule, pp, rank)) for rank in range(pp)]


def _state(held: _Held, training: Training) -> tuple[float, float, float]:
    """Bytes of weights, gradients and moments for numbers that are trained."""
    whole, shards = held.whole, training.shards
    if not training.is_fully_sharded:
        cast = 0 if training.compute_bytes == FP32 else training.compute_bytes
        moments = MOMENTS / shards
        # DistributedDataParallel's buckets, which are gradients at last, are there all the time.
        twice = 2 if training.layout.dp_cp > 1 and training.accumulates else 1
        return whole * (FP32 + cast), whole * FP32 * twice, whole * moments
    # FSDP2 keeps no whole weights between steps; stage 2 gathers all of them in the forward pass.
    gathered = (held.in_use if training.gives_up_blocks else whole) * training.compute_bytes
    waiting = (whole if training.accumulates else held.unit) * FP32
    if training.cpu_offload:
        return gathered, waiting, 0.0
    share = whole / shards
    # Whole gradients that wait turn into shards one by one.
    gradients = max(waiting, share * FP32) if training.accumulates else waiting + share * FP32
    return share * FP32 + gathered, gradients, share * MOMENTS


def _frozen(config: DecoderConfig, held: _Held, training: Training) -> float:
    """Bytes of the weights below adapters; in NF4 are only those that have one."""
    saved = 0.0  # a number of a block
    if training.adapter.kind == "qlora":
        adapted = _adapted(config, training.adapter).values()
        quantised = sum(rows * columns for rows, columns in adapted)
        saved = quantised / config.layer_parameters * (training.compute_bytes - NF4)
    whole = held.whole * training.compute_bytes - config.layers * held.block * saved
    if not training.is_fully_sharded:
        return whole
    in_use = held.in_use * training.compute_bytes - min(2, config.layers) * held.block * saved
    gathered = in_use if training.gives_up_blocks else whole
    return gathered if training.cpu_offload else whole / training.shards + gathered


def _adapters(config: DecoderConfig, training: Training) -> _Held:
    """Numbers of the two matrices beside each layer that has an adapter; one is divided by tp."""
    adapter, tp = training.adapter, training.layout.tp
    block = adapter.rank * sum(
        rows + columns / tp if name in _BY_ROWS else rows / tp + columns
        for name, (rows, columns) in _adapted(config, adapter).items()
    )
    return _Held(config.layers * block, 0, block)


def adapter_parameters(config: DecoderConfig, adapter: Adapter) -> int:
    """Numbers that training adjusts of a whole model with adapters."""
    shapes = _adapted(config, adapter).values()
    return config.layers * adapter.rank * sum(rows + columns for rows, columns in shapes)


def _adapted(config: DecoderConfig, adapter: Adapter) -> dict[str, tuple[int, int]]:
    """Shapes of a block's linear layers that get an adapter."""
    shapes = linear_shapes(config)
    targets = adapter.targets or shapes
    return {name: shape for name, shape in shapes.items() if name in targets}


def linear_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of a block's matrices by name."""
    queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
    width, hidden = config.width, config.hidden
    shapes = {
        "q_proj": (queries, width),
        "k_proj": (keys, width),
        "v_proj": (keys, width),
        "o_proj": (width, queries),
        "up_proj": (hidden, width),
        "down_proj": (width, hidden),
    }
    return shapes | ({"gate_proj": (hidden, width)} if config.gated else {})


def _logits(config: DecoderConfig, training: Training) -> float:
    """Bytes of the loss: logits as computed and in fp32, and their gradient."""
    tp, positions = training.layout.tp, training.micro_batch * training.sequence
    logits = positions / training.layout.cp * config.vocab_size
    at_once = min(logits, LOGITS_AT_ONCE) / tp * (2 * FP32 + training.compute_bytes)
    if logits <= LOGITS_AT_ONCE or training.adapter.kind != "none":
        return at_once
    # Chunk by chunk, the gradient of the head is added up beside its others.
    return at_once + config.vocab_size * config.width / tp * FP32


def _buffers(config: DecoderConfig, training: Training) -> float:
    """Bytes of batches that were read ahead, and of the cosines and sines of positions."""
    tokens = training.micro_batch * training.sequence
    return tokens * _BATCH * _BATCHES + 2 * config.context_length * config.rotary_width * FP32


def _activations(config: DecoderConfig, training: Training) -> float:
    """Bytes saved for the backward pass, by the first pipeline process, which has most."""
    layout = training.layout
    positions = training.micro_batch * training.sequence / layout.tp / layout.cp
    kept = {
        "none": _block(config, training.compute_bytes, layout),
        "selective": _block_selective(config, training.compute_bytes, layout),
        "full": config.width * FP32,
    }[training.activation_checkpoint]
    again = 0 if training.activation_checkpoint == "none" else _block(config, 2 * FP32, layout)
    return positions * (_layers(config, training)[0] * kept * _in_flight(training) + again)


def _in_flight(training: Training) -> float:
    """Micro-batches of which the first process holds its layers' activations at once."""
    pp, schedule, number = training.layout.pp, training.schedule, training.micro_batches
    if pp == 1:
        return 1
    if schedule == "gpipe":
        return number
    if schedule == "1f1b":
        return min(pp, number)
    # Of two stages, the first's of a round, then both's until the first gradient comes.
    hops = 2 if schedule == "interleaved_1f1b" else 1
    a_round = number // max(1, number // pp)
    return min(a_round + hops * (pp - 1) + 1, 2 * number) / 2


def _block(config: DecoderConfig, size: int, layout: Layout) -> float:
    """Bytes a position that one block saves."""
    streams = 2 * config.width * FP32  # what the two norms read
    heads = 2 * (config.heads + _kv_heads(config, layout))  # q, k, v and the result
    if layout.cp > 1:
        heads += config.heads  # the result again, once it is exchanged
    attention = heads * config.head_width
    feed_forward = (4 if config.gated else 2) * config.hidden
    return streams + size * (2 * config.width + attention + feed_forward)


def _block_selective(config: DecoderConfig, size: int, layout: Layout) -> float:
    """Bytes a position where only matrix products, attention and exchanges are saved."""
    heads = 2 * (config.heads + config.kv_heads)
    if layout.cp > 1:
        heads += 2 * (config.heads + _kv_heads(config, layout))
    attention = heads * config.head_width
    feed_forward = (2 if config.gated else 1) * config.hidden
    return config.width * FP32 + size * (2 * config.width + attention + feed_forward)


def _kv_heads(config: DecoderConfig, layout: Layout) -> int:
    """In attention; where context parallelism has more processes, each has one all the same."""
    return config.kv_heads if layout.cp == 1 else max(config.kv_heads, layout.cp * layout.tp)
