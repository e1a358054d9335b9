"""Bytes of activations and logits on one device; no torch here.

After Korthikanti et al. 2022, for attention that keeps no scores: what autograd keeps of this
project's model, and what is left of it with `torch.compile`.
"""

from pipelines.models.config import DecoderConfig
from pipelines.planning.memory_state import adapted_shapes
from pipelines.planning.memory_training import FP32, Training, layers_by_rank

_LOGITS_AT_ONCE = 1 << 27  # `models/loss.py` computes no more


def kept(config: DecoderConfig, training: Training) -> float:
    """What a process holds when its last backward pass begins; the first of a pipeline has most."""
    each: float = _stream(config, training)  # what a block reads
    if training.activation_checkpoint != "full":
        each = (_block_selective if training.computes_again else _block)(config, training)
    blocks = layers_by_rank(config, training)[0] * _in_flight(training) * each
    # The first process of a pipeline has no head; the last, which has, holds fewer micro-batches.
    root = _root(config, training) if training.layout.pp == 1 else 0.0
    return training.positions * (blocks + root)


def computed_again(config: DecoderConfig, training: Training) -> float:
    """What a block that is computed again adds to what it kept."""
    if not training.computes_again:
        return 0.0
    is_full = training.activation_checkpoint == "full"
    kept_already = 0.0 if is_full else _block_selective(config, training)
    return training.positions * max(0.0, _block(config, training) - kept_already)


def within_block(config: DecoderConfig, training: Training) -> float:
    """Gradients of a block's activations, at most: of the feed-forward layer and of the stream."""
    inner = (2 if config.gated else 1) * config.hidden * training.compute_bytes
    return training.positions * (inner + training.stream_copies * config.width * FP32)


def of_one_block(config: DecoderConfig, training: Training) -> float:
    """What is left when the backward pass comes to the first block."""
    if training.computes_again:
        read = training.positions * _stream(config, training)
        return read + computed_again(config, training)
    return training.positions * _block(config, training)


def logits(config: DecoderConfig, training: Training) -> tuple[float, float]:
    """What the loss takes at the end of the forward pass, and as the backward pass begins.

    Logits as computed and in fp32 and their logarithms; then those, their gradient and that of the
    logits, or the last with the gradient of the head's weight. Compiled, logits and their gradient.
    """
    tp, size = training.layout.tp, training.compute_bytes
    positions = training.micro_batch * training.sequence / training.layout.cp
    whole = positions * config.vocab_size
    at_once = min(whole, _LOGITS_AT_ONCE) / tp
    cast = 0 if size == FP32 else size
    weight = config.vocab_size * config.width / tp * FP32 if training.trains_all else 0.0
    forward, backward = at_once * (2 * FP32 + cast), at_once * 3 * FP32
    gradient = at_once * (FP32 + cast)
    if training.compiled and tp == 1:  # over several processes the loss isn't compiled
        gradient = at_once * size
        forward = backward = 2 * gradient
    backward = max(backward, gradient + weight)
    if whole <= _LOGITS_AT_ONCE:
        return forward, backward
    # Chunk by chunk, gradients of the head and of what it reads are added up meanwhile.
    both = max(forward, backward) + weight + positions * config.width * FP32
    return both, weight


def _root(config: DecoderConfig, training: Training) -> float:
    """Return what the last norm and the head keep of a position."""
    norm = config.width * FP32 * (2 if _norms_keep_twice(config, training) else 1)
    # Under tensor parallelism what products read is gathered.
    read = config.width * training.compute_bytes if training.trains_all else 0
    return training.stream_copies * norm + training.layout.tp * read


def _block(config: DecoderConfig, training: Training) -> float:
    """Bytes a position that one block saves."""
    return (_block_compiled if training.compiled else _block_eager)(config, training)


def _block_compiled(config: DecoderConfig, training: Training) -> float:
    """What Inductor's cut between the passes leaves, as seen: element-wise work is done again.

    The stream, what attention adds to it, both norms' results, attention's operands and result, and
    the feed-forward layer's inner products.
    """
    norms = 1 if config.shared_norm else 2
    read = training.layout.tp * norms * config.width
    written = 0 if config.parallel_residual else training.stream_copies * config.width
    heads = 2 * (config.heads + _kv_heads(config, training)) * config.head_width
    inner = heads + (3 if config.gated else 2) * config.hidden + _adapters(config, training)
    return _stream(config, training) + training.compute_bytes * (read + written + inner)


def _block_eager(config: DecoderConfig, training: Training) -> float:
    """What autograd keeps."""
    layout, size = training.layout, training.compute_bytes
    norms = 1 if config.shared_norm else 2
    streams = (1 if config.parallel_residual else 2) * config.width * FP32  # what the norms read
    if _norms_keep_twice(config, training):
        streams += norms * config.width * FP32
    queries_keys = (config.heads + config.kv_heads) * config.head_width
    if config.qk_norm:
        streams += queries_keys * FP32 * (2 if _norms_keep_twice(config, training) else 1)
    heads = 2 * (config.heads + _kv_heads(config, training))  # q, k, v and the result
    if layout.cp > 1 or 0 < config.rotary_width < config.head_width:
        # The result again: once it is exchanged, or laid out anew after heads turned in part.
        heads += config.heads
    feed_forward = (4 if config.gated else 2) * config.hidden
    # Autocast gives each matrix a copy of its own of what a norm in fp32 hands out.
    read = (5 if config.gated else 4) if _casts_activations(training) else norms
    # Under tensor parallelism all of it is gathered.
    whole = layout.tp * read * config.width
    inner = heads * config.head_width + feed_forward + _adapters(config, training)
    return training.stream_copies * streams + config.heads * FP32 + size * (whole + inner)


def _block_selective(config: DecoderConfig, training: Training) -> float:
    """Bytes a position where only matrix products, attention and exchanges are saved."""
    heads = 2 * (config.heads + config.kv_heads)
    if training.layout.cp > 1:
        heads += 2 * (config.heads + _kv_heads(config, training))
    attention = heads * config.head_width
    feed_forward = (2 if config.gated else 1) * config.hidden
    # Under tensor parallelism what is written to the stream is kept before it is summed, and after.
    tp = training.layout.tp
    before = tp if tp > 1 and not training.compiled else 0
    written = 2 * config.width * (before + training.stream_copies)
    inner = written + attention + feed_forward
    return _stream(config, training) + training.compute_bytes * inner


def _adapters(config: DecoderConfig, training: Training) -> float:
    """Numbers a position that a block's adapters keep: what is thin, and what dropout leaves."""
    if training.trains_all:
        return 0.0
    shapes = adapted_shapes(config, training.adapter).values()
    dropped = sum(columns for _, columns in shapes) if training.adapter.dropout else 0
    return len(shapes) * training.adapter.rank + 1.5 * dropped  # and its mask


def _stream(config: DecoderConfig, training: Training) -> int:
    """Return the bytes of a position of the residual stream, which has the embeddings' type."""
    size = training.compute_bytes if _weights_in_half(training) else FP32
    return training.stream_copies * config.width * size


def _weights_in_half(training: Training) -> bool:
    """Whether products' weights lie so, and not only copies of them: gathered, or frozen."""
    in_half = training.is_fully_sharded or not training.trains_all
    return training.compute_bytes < FP32 and in_half


def _norms_keep_twice(config: DecoderConfig, training: Training) -> bool:
    """Tell whether norms keep twice: on a CPU a trained RMSNorm keeps what it normalised, too."""
    is_eager = training.on_cpu and not training.compiled
    return is_eager and config.norm == "rms" and training.trains_all


def _casts_activations(training: Training) -> bool:
    """Whether products in half precision read what norms give in fp32.

    On a CPU autocast lets a norm whose weight is in half precision give that.
    """
    if training.on_cpu and _weights_in_half(training):
        return False
    return training.compute_bytes < FP32


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


def _kv_heads(config: DecoderConfig, training: Training) -> int:
    """Return the key-value heads in attention; under context parallelism one a process at least."""
    layout = training.layout
    return config.kv_heads if layout.cp == 1 else max(config.kv_heads, layout.cp * layout.tp)
