"""Formulas for the work of a training step, and for the resource that limits it most.

Model FLOPs utilisation (MFU) follows Chowdhery et al. 2022 (PaLM), appendix B; model bandwidth
utilisation (MBU) is the same for bytes. The resource with the highest share is the bottleneck, as
in the roofline model (Williams et al. 2009), if that share is at least a half; else the host is.

The figures count the model's own work: neither recomputation by activation checkpointing nor
traffic that a kernel could have saved counts.
"""

from dataclasses import dataclass

from pipelines.models.config import DecoderConfig
from pipelines.planning.hardware import Hardware
from pipelines.recipe.training_section import Precision

# Where values have another width than queries, the head width is the mean of both.
FLOPS_FORMULA = "6 N + 12 L S A a token (PaLM, appendix B); N in matrices, A = heads x head width"

HOST = "host"
_REACHED = 0.5  # the least share of a roof at which it binds a step
_FORWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT = 2, 2, 2  # FLOPs per weight and token
_FP32 = 4  # bytes
_ADAMW_ACCESSES = 7  # reads gradient, weight and both moments; writes weight and moments
_CLIP_ACCESSES = 3  # reads gradients for their norm, then reads and writes them to scale them
ACTIVATION_ACCESSES = 5  # written, read in both passes; its gradient is written and read


@dataclass(frozen=True)
class Work:
    """The work of one process in one optimizer step.

    Attributes:
        flops: FLOPs of the forward and the backward pass.
        memory_bytes: Bytes moved between the device and its memory.
        pcie_bytes: Bytes moved from the host to the device.
    """

    flops: float
    memory_bytes: float
    pcie_bytes: float


@dataclass(frozen=True)
class Share:
    """The numbers that decide one process's part of a step.

    Attributes:
        tokens: Tokens of the global batch.
        length: Tokens of a sample.
        micro_batches: Forward passes per step.
        model: The number of parts into which tp and pp divide one replica's matrix products.
        data: Processes that have different tokens (dp times cp, since cp divides samples).
        shards: Processes over which weights, gradients and moments are sharded.
        trainable: The fraction of the weights that is trained; below 1 with adapters.
        frozen_bytes: Bytes per frozen weight, as stored in memory.
        offloaded: Whether weights are kept in the host's memory between uses.
        paged: Whether AdamW's moments are.
        ep: Processes that divide the experts of a layer.
    """

    tokens: int
    length: int
    micro_batches: int
    model: int = 1
    data: int = 1
    shards: int = 1
    trainable: float = 1.0
    frozen_bytes: float = _FP32
    offloaded: bool = False
    paged: bool = False
    ep: int = 1


def matrix_parameters(config: DecoderConfig) -> float:
    """Return the number of weights in a token's matrix products: all but looked-up embeddings.

    Of a mixture, only the experts that a token goes through count.
    """
    head = config.vocab_size * config.width
    return config.layers * config.active_layer_parameters + head


def flops_per_token(config: DecoderConfig, length: int, trainable: float = 1.0) -> float:
    """Return `FLOPS_FORMULA` for samples of `length`; frozen weights need no gradient, so 4 N.

    As in the paper, attention is counted in full, without a reduction for causality, windows or
    documents.
    """
    weights = _FORWARD + _INPUT_GRADIENT + _WEIGHT_GRADIENT * trainable
    attention = 6 * config.layers * length * config.heads * (config.head_width + config.value_width)
    return weights * matrix_parameters(config) + attention


def activations_per_token(config: DecoderConfig) -> float:
    """Return how many numbers per token the backward pass needs, without attention's scores.

    Flash kernels keep no scores. A block keeps the residual stream twice, both norms' results,
    queries, keys and values (rotary positions add a second copy of queries and keys), attention's
    result and the feed-forward layer's inner activations, and what it adds to the stream where that
    is normalised; after the blocks, the last norm and the logits are kept (Korthikanti et al. 2022,
    section 4).
    """
    queries = config.heads * config.head_width
    keys = config.kv_heads * config.head_width
    turned = queries + keys if config.positions == "rotary" else 0
    inner = (4 if config.gated else 2) * config.hidden_per_token
    routed = 2 * config.experts_per_token * config.width  # sorted inputs and results
    streams = (6 if config.branch_norms else 4) * config.width
    block = streams + 2 * queries + 2 * keys + turned + inner + routed
    return config.layers * block + 2 * config.width + config.vocab_size


def step_work(config: DecoderConfig, share: Share, precision: Precision) -> Work:
    """Return the work of one process in one step.

    In each micro-batch, both passes read the weights, gradients are read and written, and
    activations move five times. Once per step, clipping and AdamW access the process's shard.
    Trained weights and gradients count in fp32, activations in the precision of products.
    """
    tokens = share.tokens / share.data
    away = config.layers * config.expert_parameters * (1 - 1 / share.ep)
    weights = (config.parameters - away) / share.model
    trained = weights * share.trainable
    held = trained * _FP32 + (weights - trained) * share.frozen_bytes
    passes = share.micro_batches * 2 * (held + trained * _FP32)
    updated = config.parameters / share.model * share.trainable / share.shards
    update = _FP32 * (_CLIP_ACCESSES + _ADAMW_ACCESSES) * updated
    width = _FP32 if precision in ("fp32", "tf32") else 2
    activations = activations_per_token(config) * tokens / share.model * width
    ids = 2 * 8 * tokens  # inputs and targets, int64 at most
    loads = share.micro_batches * held / share.shards if share.offloaded else 0.0
    # They leave as fast as they come, at the same time.
    loads += 2 * _FP32 * updated if share.paged else 0.0
    return Work(
        flops=flops_per_token(config, share.length, share.trainable) * tokens / share.model,
        memory_bytes=passes + update + activations * ACTIVATION_ACCESSES,
        pcie_bytes=ids + loads,
    )


@dataclass(frozen=True)
class Utilisation:
    """The share of each resource in a step: the first three by formula, the waiting as measured.

    Attributes:
        mfu: The model's FLOPs over the most that the device could do in the time.
        mbu: Bytes of memory traffic over the most that the memory could move in the time.
        pcie: Bytes from the host over the most that PCIe could move in the time.
        network: The share of time when only collectives ran; 0 if it was not measured.
        storage: The share of time when the process waited for its data.
        memory: The name of the device's memory.
    """

    mfu: float
    mbu: float
    pcie: float
    network: float
    storage: float
    memory: str

    def bound_by(self) -> tuple[str, float]:
        """Return the resource whose share is the greatest, and that share.

        A roof that is not reached by half binds nothing. Then it is the host, with the share of the
        step in which it kept the device idle, or the device was slower than its roofs.
        """
        shares = {
            "compute": self.mfu,
            self.memory: self.mbu,
            "PCIe": self.pcie,
            "network": self.network,
            "storage": self.storage,
        }
        name, share = max(shares.items(), key=lambda item: item[1])
        if share >= _REACHED:
            return name, share
        # The device's part, and waiting; on a busy machine they may overlap.
        known = max(self.mfu, self.mbu, self.pcie) + self.network + self.storage
        return HOST, max(0.0, 1 - known)


def utilisation(
    work: Work,
    hardware: Hardware,
    precision: Precision,
    *,
    seconds: float,
    network: float = 0.0,
    storage: float = 0.0,
) -> Utilisation:
    """Return the shares of a device that a step of `seconds` uses; without PCIe it is a CPU."""
    pcie = hardware.pcie_bandwidth
    return Utilisation(
        mfu=work.flops / hardware.peak(precision) / seconds,
        mbu=work.memory_bytes / hardware.memory_bandwidth / seconds,
        pcie=0.0 if pcie is None else work.pcie_bytes / pcie / seconds,
        network=network,
        storage=storage,
        memory=hardware.memory_name,
    )
