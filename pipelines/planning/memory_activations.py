"""Bytes of activations and logits on one device; no torch here.

The formulas follow Korthikanti et al. 2022, for attention that keeps no scores. They give the bytes
that autograd keeps for this project's model, without and with `torch.compile`.
"""

from pipelines.models.config import DecoderConfig
from pipelines.parallel.division import adapted_matrices, is_of_experts, trains_experts
from pipelines.parallel.layout import stage_count, stage_numbers
from pipelines.planning.memory_training import FP32, Training, layers_of

INT64 = 8
_LOGITS_AT_ONCE = 1 << 27  # `models/loss.py` computes at most so many logits at once


def kept(config: DecoderConfig, training: Training) -> float:
    """Return the bytes that a process keeps before backward."""
    each: float = _stream(config, training)  # a block's input
    if training.activation_checkpoint != "full":
        each = (_block_selective if training.computes_again else _block)(config, training)
    blocks = layers_of(config, training) * in_flight(training) * each
    root = _root(config, training) if training.has_head else 0.0
    return training.positions * (blocks + root)


def computed_again(config: DecoderConfig, training: Training) -> float:
    """Return the bytes that computing a block again adds to the bytes it kept."""
    if not training.computes_again:
        return 0.0
    is_full = training.activation_checkpoint == "full"
    kept_already = 0.0 if is_full else _block_selective(config, training)
    return training.positions * max(0.0, _block(config, training) - kept_already)


def in_flight(training: Training) -> float:
    """Return the number of micro-batches whose activations a process holds at once.

    One that has passed one of a process's two stages counts half.
    """
    pp, schedule, number = training.layout.pp, training.schedule, training.micro_batches
    if pp == 1:
        return 1
    behind = pp - 1 - training.rank
    if schedule == "gpipe":
        return number
    if schedule == "1f1b":
        return min(behind + 1, number)
    # With two stages, it holds the first stage's activations of a round, then those of both stages
    # until the first gradient comes. Without bubbles, the gradients of weights wait for as many
    # micro-batches as there are processes before it.
    further = 2 * behind if schedule == "interleaved_1f1b" else behind + training.rank
    a_round = number // max(1, number // pp)
    return min(a_round + further + 1, 2 * number) / 2


def received(config: DecoderConfig, training: Training) -> float:
    """Return the bytes that a pipeline's process receives into: it has them all along.

    Each micro-batch has memory of its own, for what comes from the stage before and for the
    gradient from the stage after.
    """
    pp, schedule = training.layout.pp, training.schedule
    last = stage_count(schedule, pp) - 1
    sides = sum((n > 0) + (n < last) for n in stage_numbers(schedule, pp, training.rank))
    return sides * training.micro_batches * training.positions * _stream(config, training)


def within_block(config: DecoderConfig, training: Training) -> float:
    """Return the most bytes of a block's activation gradients: feed-forward layer and stream."""
    inner = (2 if config.gated else 1) * config.hidden_per_token * training.compute_bytes
    return training.positions * (inner + _stream(config, training))


def of_one_block(config: DecoderConfig, training: Training) -> float:
    """Return the activation bytes left when the backward pass reaches the first block."""
    if training.computes_again:
        read = training.positions * _stream(config, training)
        return read + computed_again(config, training)
    return training.positions * _block(config, training)


def logits(config: DecoderConfig, training: Training) -> tuple[float, float]:
    """Return the bytes of the loss at the end of the forward pass and as the backward pass begins.

    Forward: logits as computed, logits in fp32 and log-probabilities. Backward: fp32 tensors and
    gradients, or the logits' and head weight's gradients. Compiled: logits and their gradient.
    """
    if not training.has_head:
        return 0.0, 0.0
    tp, size = training.layout.tp, training.compute_bytes
    positions = training.micro_batch * training.sequence / training.layout.cp
    whole = positions * config.vocab_size
    at_once = min(whole, _LOGITS_AT_ONCE) / tp
    cast = 0 if size == FP32 else size
    weight = config.vocab_size * config.width / tp * FP32 if training.trains_all else 0.0
    # Under tensor parallelism the loss keeps no fp32 logits beside their exponentials.
    forward, backward = at_once * (2 * FP32 + cast), at_once * (3 if tp == 1 else 2) * FP32
    gradient = at_once * (FP32 + cast)
    if training.compiled and tp == 1:  # under tensor parallelism the loss is not compiled
        gradient = at_once * size
        forward = backward = 2 * gradient
    waiting = _losses_that_wait(training)
    if whole <= _LOGITS_AT_ONCE:
        others = waiting * at_once * FP32
        return forward + others, max(backward, gradient + weight) + others
    # In chunks, the gradients of the head's weight and input are added up during the forward pass,
    # the weight's by slices too small to count.
    added = weight + positions * config.width * size
    return max(forward, backward) + (1 + waiting) * added, weight + waiting * added


def _root(config: DecoderConfig, training: Training) -> float:
    """Return the bytes per position that the last norm and the head keep."""
    norm = config.width * _norm_input(config, training)
    if _norms_keep_twice(config, training):
        norm += config.width * FP32
    # Under tensor parallelism, the inputs of matrix products are gathered.
    read = config.width * training.compute_bytes if training.trains_all else 0
    return training.stream_copies * norm + training.layout.tp * read


def _block(config: DecoderConfig, training: Training) -> float:
    """Return the bytes per position that one block saves."""
    return (_block_compiled if training.compiled else _block_eager)(config, training)


def _block_compiled(config: DecoderConfig, training: Training) -> float:
    """Return the bytes per position that one compiled block saves, as observed.

    Inductor repeats element-wise work in the backward pass. It keeps the stream, attention's
    addition to it, both norms' results, attention's operands and result, and the feed-forward
    layer's inner products; also what the two add to the stream, where that is normalised. To round
    what a product in fp8 reads is element-wise work, too. Under tensor parallelism that is done
    behind the exchange unless a tensor has one scale, so what is exchanged is kept.
    """
    shared = training.fp8_scaling != "tensorwise" and training.layout.tp > 1
    rounded = training.precision == "fp8" and not shared
    norms = 0 if rounded else _norms_read(config, training)
    read = training.layout.tp * (norms * config.width + 2 * config.latents)
    written = 0 if config.parallel_residual else training.stream_copies * config.width
    written += 2 * training.stream_copies * config.width * config.branch_norms
    heads = 2 * (config.heads + _kv_heads(config, training)) * config.head_width
    hidden = ((3 if config.gated else 2) - rounded) * config.hidden_per_token
    inner = heads + hidden + _adapters(config, training)
    stream = _stream(config, training) + _routed(config, training)
    return stream + training.compute_bytes * (read + written + inner)


def _block_eager(config: DecoderConfig, training: Training) -> float:
    """Return the bytes per position that autograd keeps of one block without `torch.compile`."""
    layout, size = training.layout, training.compute_bytes
    norms = 1 if config.shared_norm else 2
    of_branches = 2 if config.branch_norms else 0
    streams = ((1 if config.parallel_residual else 2) + of_branches) * config.width
    streams *= _norm_input(config, training)
    if _norms_keep_twice(config, training):
        streams += (norms + of_branches) * config.width * FP32
    queries_keys = (config.heads + config.kv_heads) * config.head_width
    if config.qk_norm:
        streams += queries_keys * FP32 * (2 if _norms_keep_twice(config, training) else 1)
    heads = 2 * (config.heads + _kv_heads(config, training))  # q, k, v and the result
    if layout.cp > 1 or config.sinks or 0 < config.rotary_width < config.head_width:
        # A second copy of the result: exchanged, scaled by the share of sinks, or re-laid after a
        # partial rotation of heads.
        heads += config.heads
    feed_forward = (6 if config.gate_limit else 4 if config.gated else 2) * config.hidden_per_token
    if not training.trains_all and "down_proj" not in adapted_matrices(config, training.adapter):
        feed_forward -= config.hidden_per_token  # inputs of frozen products are not kept
    # Under tensor parallelism, the norms' results are gathered for the matrix products.
    read = layout.tp * (_norms_read(config, training) * config.width + 2 * config.latents)
    inner = heads * config.head_width + feed_forward + _adapters(config, training)
    stream = training.stream_copies * streams + _routed(config, training)
    return stream + config.heads * FP32 + size * (read + inner)


def _norms_read(config: DecoderConfig, training: Training) -> int:
    """Return how many norms of a block have a result that is kept: a product that learns reads it.

    A frozen product keeps nothing that it reads, but its adapter does.
    """
    norms = 1 if config.shared_norm else 2
    if training.trains_all:
        return norms
    adapted = adapted_matrices(config, training.adapter)
    readers = [name for name in adapted if not name.endswith(("o_proj", "down_proj"))]
    halves = {name in config.attention_shapes for name in readers}  # attention, feed-forward layer
    return min(norms, len(halves))


def _routed(config: DecoderConfig, training: Training) -> float:
    """Return the bytes per position that a mixture of experts keeps beside its inner activations.

    They are each expert's logit and score; of those chosen, weights before and after they are
    normalised, number, and places in the order of experts and back; and what goes into the experts
    and comes out of them. Tensor parallel processes all have all of it.
    """
    width = (1 + trains_experts(config, training.adapter)) * config.width * training.compute_bytes
    chosen = config.experts_per_token * (width + 2 * FP32 + 4 * INT64)
    return training.layout.tp * (chosen + config.experts * 2 * FP32)


def _block_selective(config: DecoderConfig, training: Training) -> float:
    """Return the bytes per position if a block saves only products, attention and exchanges."""
    heads = 2 * (config.heads + config.kv_heads)
    if training.layout.cp > 1:
        heads += 2 * (config.heads + _kv_heads(config, training))
    attention = heads * config.head_width
    feed_forward = (2 if config.gated else 1) * config.hidden_per_token
    # Under tensor parallelism, additions to the stream are kept both before and after their sum.
    tp = training.layout.tp
    before = tp if tp > 1 and not training.compiled else 0
    written = 2 * config.width * (before + training.stream_copies)
    routed = training.layout.tp * config.experts_per_token * config.width
    inner = written + attention + feed_forward + routed + training.layout.tp * config.latents
    return _stream(config, training) + training.compute_bytes * inner


def _adapters(config: DecoderConfig, training: Training) -> float:
    """Return how many numbers per position a block's adapters keep: thin results and dropout."""
    if training.trains_all:
        return 0.0
    kept, adapter = 0.0, training.adapter
    for name, (_, columns, number) in adapted_matrices(config, adapter).items():
        dropped = 1.5 * columns if adapter.dropout else 0  # and its mask
        chosen = config.experts_per_token / config.experts if is_of_experts(config, name) else 1
        kept += chosen * number / config.layers * (adapter.rank + dropped)
    return kept


def _stream(config: DecoderConfig, training: Training) -> int:
    """Return the bytes per position of the residual stream."""
    return training.stream_copies * config.width * training.compute_bytes


def _norm_input(config: DecoderConfig, training: Training) -> int:
    """Return the bytes of a number that a norm keeps; RMSNorm on a CPU keeps it in fp32."""
    in_fp32 = _is_unfused(config, training) or config.zero_centred_norms
    return FP32 if in_fp32 else training.compute_bytes


def _norms_keep_twice(config: DecoderConfig, training: Training) -> bool:
    """Return whether norms keep two tensors; a trained RMSNorm on a CPU keeps its result too."""
    return _is_unfused(config, training) and training.trains_all


def _is_unfused(config: DecoderConfig, training: Training) -> bool:
    """Return whether norms are several operations in fp32."""
    return training.on_cpu and not training.compiled and config.norm == "rms"


def _losses_that_wait(training: Training) -> int:
    """Return of how many other micro-batches the last process keeps what their loss has computed.

    GPipe computes all losses before the first gradient; without bubbles, the gradients of weights
    wait for as many micro-batches as there are processes before it.
    """
    if training.layout.pp == 1:
        return 0
    if training.schedule == "gpipe":
        return training.micro_batches - 1
    return training.rank if training.schedule == "zero_bubble" else 0


def _kv_heads(config: DecoderConfig, training: Training) -> int:
    """Return the number of key-value heads in attention; each process gets at least one."""
    layout = training.layout
    return config.kv_heads if layout.cp == 1 else max(config.kv_heads, layout.cp * layout.tp)
