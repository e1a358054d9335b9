"""What a training step asks of a machine, by formula, and which of its roofs it comes nearest.

Model FLOPs utilisation (MFU) is Chowdhery et al. 2022 (PaLM), appendix B; model bandwidth
utilisation (MBU) is the same of bytes; the highest share names what binds, as in the roofline
model (Williams et al. 2009).

These are figures of the model: what is computed again by activation checkpointing counts for
nothing, and neither does traffic that a kernel could have saved.
"""

from dataclasses import dataclass

from pipelines.models.config import DecoderConfig
from pipelines.planning.hardware import Hardware, Precision

FLOPS_FORMULA = "6 N + 12 L S A a token (PaLM, appendix B); N in matrices, A = heads x head width"

_FORWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT = 2, 2, 2  # FLOPs a weight and token
_FP32 = 4  # bytes
_ADAMW_ACCESSES = 7  # gradient, weight and both moments read; weight and moments written
_CLIP_ACCESSES = 3  # gradients are read for their norm, then read and written to scale them
ACTIVATION_ACCESSES = 5  # written, read forward, read backward; its gradient written and read


@dataclass(frozen=True)
class Work:
    """One optimizer step of one process.

    Attributes:
        flops: Of forward and backward pass.
        memory_bytes: Between device and its memory.
        pcie_bytes: From the host to the device.
    """

    flops: float
    memory_bytes: float
    pcie_bytes: float


@dataclass(frozen=True)
class Share:
    """How a process's part of a step is cut out of the whole.

    Attributes:
        tokens: Of the global batch.
        length: Of a sample, in tokens.
        micro_batches: Forward passes a step.
        model: Into how many parts the matrix products of one replica are cut (tp times pp).
        data: Processes with tokens of their own (dp times cp, as cp cuts samples).
        shards: Processes over which weights, gradients and moments are sharded.
        trainable: The part of the weights that is trained; below 1 with adapters.
        frozen_bytes: Of one of the others, as it lies in memory.
        offloaded: Whether weights wait in the host's memory.
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


def matrix_parameters(config: DecoderConfig) -> int:
    """Weights that take part in a matrix product: all but looked-up embeddings."""
    head = config.vocab_size * config.width
    return config.layers * config.layer_parameters + head


def flops_per_token(config: DecoderConfig, length: int, trainable: float = 1.0) -> float:
    """`FLOPS_FORMULA` for samples of `length`; a frozen weight needs no gradient of its own: 4 N.

    As in the paper, attention is counted whole: not halved for causality, nor cut by windows and
    documents.
    """
    weights = _FORWARD + _INPUT_GRADIENT + _WEIGHT_GRADIENT * trainable
    attention = 12 * config.layers * length * config.heads * config.head_width
    return weights * matrix_parameters(config) + attention


def activations_per_token(config: DecoderConfig) -> int:
    """Numbers kept for the backward pass, without attention's scores, which flash kernels spare.

    A block keeps the residual stream twice, both norms' results, queries, keys and values (the
    first two once more where they are turned), attention's result and the feed-forward layer's
    inner ones; then come the last norm and the logits (as Korthikanti et al. 2022, section 4).
    """
    queries = config.heads * config.head_width
    keys = config.kv_heads * config.head_width
    turned = queries + keys if config.positions == "rotary" else 0
    inner = (4 if config.gated else 2) * config.hidden
    block = 4 * config.width + 2 * queries + 2 * keys + turned + inner
    return config.layers * block + 2 * config.width + config.vocab_size


def step_work(config: DecoderConfig, share: Share, precision: Precision) -> Work:
    """What one process does in one step.

    Memory: in each micro-batch the weights are read by the forward and by the backward pass, and
    gradients read and written; activations go five times; once a step clipping and AdamW go
    over the process's shard. Trained weights and gradients are counted in fp32, activations in
    the precision of products.
    """
    tokens = share.tokens / share.data
    weights = config.parameters / share.model
    trained = weights * share.trainable
    held = trained * _FP32 + (weights - trained) * share.frozen_bytes
    passes = share.micro_batches * 2 * (held + trained * _FP32)
    update = _FP32 * (_CLIP_ACCESSES + _ADAMW_ACCESSES) * trained / share.shards
    width = _FP32 if precision in ("fp32", "tf32") else 2
    activations = activations_per_token(config) * tokens / share.model * width
    ids = 2 * 8 * tokens  # inputs and targets, int64 at most
    loads = share.micro_batches * held / share.shards if share.offloaded else 0.0
    return Work(
        flops=flops_per_token(config, share.length, share.trainable) * tokens / share.model,
        memory_bytes=passes + update + activations * ACTIVATION_ACCESSES,
        pcie_bytes=ids + loads,
    )


@dataclass(frozen=True)
class Utilisation:
    """Shares of a step's time: of roofs by formula, of waiting as it was measured.

    Attributes:
        mfu: FLOPs of the model over what the device could have done in the time.
        mbu: Bytes likewise.
        pcie: Bytes from the host likewise.
        network: In which collectives ran and nothing else; 0 where unmeasured.
        storage: In which the process waited for its data.
        memory: What the device's memory is called.
    """

    mfu: float
    mbu: float
    pcie: float
    network: float
    storage: float
    memory: str

    def bound_by(self) -> tuple[str, float]:
        """The resource whose share is the greatest, and that share."""
        shares = {
            "compute": self.mfu,
            self.memory: self.mbu,
            "PCIe": self.pcie,
            "network": self.network,
            "storage": self.storage,
        }
        return max(shares.items(), key=lambda item: item[1])


def utilisation(
    work: Work,
    hardware: Hardware,
    precision: Precision,
    *,
    seconds: float,
    network: float = 0.0,
    storage: float = 0.0,
) -> Utilisation:
    """A step of `seconds` against the device's roofs; a device without PCIe is a CPU."""
    pcie = hardware.pcie_bandwidth
    return Utilisation(
        mfu=work.flops / hardware.peak(precision) / seconds,
        mbu=work.memory_bytes / hardware.memory_bandwidth / seconds,
        pcie=0.0 if pcie is None else work.pcie_bytes / pcie / seconds,
        network=network,
        storage=storage,
        memory=hardware.memory_name,
    )
