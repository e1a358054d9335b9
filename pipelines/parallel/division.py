"""What of a decoder each process gets, in numbers; no torch, so a bad layout is refused at once."""

from math import ceil, gcd

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.parallel.layout import Layout, check_micro_batches, split_layers, stage_count
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.training_section import Adapter, Fp8Scaling, Precision

BY_ROWS = ("o_proj", "down_proj")  # the matrices that tensor parallelism divides by rows
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_NF4_BLOCK = 64  # `BLOCK` of `models/quantization.py`, which needs torch
_MOMENTS_BLOCK = 64  # numbers of a row that share a scale; larger ones fit fewer `parallel.tp`
MX_BLOCK = 32  # numbers of a row that share a scale in mxfp8
# Layers in fp8 read and write multiples of this, which the kernels need, or the scales; the others
# stay in bf16.
FP8_MULTIPLES: dict[Fp8Scaling, int] = {"tensorwise": 16, "rowwise": 16, "mx": MX_BLOCK}


def check_division(config: DecoderConfig, layout: Layout, recipe: Recipe) -> None:
    """Check that a layout can divide a model and its batches.

    Raises:
        UserError: one line with the numbers that don't fit.
    """
    parallel, train = recipe.parallel, recipe.train
    check_divisible(config, layout.tp)
    _check_heads(config, layout)
    _check_sequence(layout, recipe)
    _check_adapter(config, layout, recipe.adapter)
    if config.experts:
        _check_experts(config, layout, recipe)
    elif parallel.ep > 1:
        raise UserError(f"parallel.ep({parallel.ep}): the model has no experts; set 1")
    if train.optimizer == "adamw_8bit":
        _check_moments(config, layout.tp)
    if parallel.paged_moments:
        _check_paging(recipe)
    if train.precision == "fp8" and train.fp8_scaling == "mx":
        _check_mx(config, layout, recipe.data.sequence_length)
    if parallel.async_tp:
        _check_products(config, recipe)
    if layout.pp == 1:
        return
    stage_layers(config, stage_count(parallel.schedule, layout.pp))
    if parallel.schedule == "zero_bubble" and train.compile is True:
        raise UserError(
            "train.compile: not with parallel.schedule = zero_bubble, which computes gradients of "
            "weights apart; set interleaved_1f1b"
        )
    if train.micro_batch_size != "auto":
        share = ceil(train.global_batch_size / layout.dp)
        check_micro_batches(parallel.schedule, layout.pp, ceil(share / train.micro_batch_size))


def _check_heads(config: DecoderConfig, layout: Layout) -> None:
    """Check that context parallelism can divide the heads that tensor parallelism leaves."""
    heads, kv_heads = config.heads // layout.tp, config.kv_heads // layout.tp
    each = f" of each of parallel.tp({layout.tp})" if layout.tp > 1 else ""
    if heads % layout.cp:
        raise UserError(
            f"parallel.cp({layout.cp}) does not divide the model's heads({heads}){each}"
        )
    if kv_heads % layout.cp and layout.cp % kv_heads:
        raise UserError(
            f"parallel.cp({layout.cp}) and the model's kv_heads({kv_heads}){each}: one must divide "
            "the other"
        )


def _check_sequence(layout: Layout, recipe: Recipe) -> None:
    length, tp, cp = recipe.data.sequence_length, layout.tp, layout.cp
    if length % cp:
        raise UserError(
            f"parallel.cp({cp}) does not divide data.sequence_length({length}); change one of them"
        )
    if recipe.parallel.sequence_parallel and length // cp % tp:
        by = f"parallel.tp({tp})" if cp == 1 else f"parallel.tp({tp}) * cp({cp})"
        raise UserError(
            f"{by} does not divide data.sequence_length({length}); change it, or set "
            "parallel.sequence_parallel = false"
        )


def _check_adapter(config: DecoderConfig, layout: Layout, adapter: Adapter) -> None:
    if adapter.kind == "none":
        return
    if layout.tp > 1 and adapter.kind == "qlora":
        _check_blocks(config, layout.tp, adapter)
    if layout.pp * layout.tp > 1 and adapter.dropout:
        raise UserError(
            f"parallel.pp({layout.pp}) * tp({layout.tp}): not with adapter.dropout"
            f"({adapter.dropout:g}), which each process would draw by itself; set 0"
        )


def _check_experts(config: DecoderConfig, layout: Layout, recipe: Recipe) -> None:
    """Check what a mixture of experts can't have yet, and that its experts can be divided."""
    train, adapter = recipe.train, recipe.adapter
    if recipe.parallel.ep > 1:
        _check_expert_parallel(config, layout, recipe)
    if train.precision == "fp8":
        raise UserError(
            "train.precision = fp8: not with a mixture of experts, whose products it does not "
            "round; set bf16"
        )
    if adapter.kind == "qlora" and trains_experts(config, adapter):
        raise UserError(
            "adapter.kind = qlora: not on the experts of a mixture, as NF4 is for layers of one "
            "matrix; set lora, or adapter.targets to layers of attention"
        )
    # What is added to even out the batches predicts nothing, but would be routed.
    micro = 1 if train.micro_batch_size == "auto" else train.micro_batch_size
    if train.global_batch_size % (layout.dp * micro):
        raise UserError(
            f"train.global_batch_size({train.global_batch_size}): for a mixture of experts it must "
            f"be a multiple of micro_batch_size({micro}) * data-parallel processes({layout.dp})"
        )


def _check_expert_parallel(config: DecoderConfig, layout: Layout, recipe: Recipe) -> None:
    parallel = recipe.parallel
    ep = parallel.ep
    if parallel.sharding not in ("gradients", "full", "auto"):
        raise UserError(
            f"parallel.ep({ep}): not with parallel.sharding = {parallel.sharding}; set gradients "
            "or full"
        )
    for what, number in (
        ("the model's experts", config.experts),
        ("parallel.dp_shard * cp", layout.shards),
    ):
        if number % ep:
            raise UserError(f"parallel.ep({ep}) does not divide {what}({number})")
    alike = layout.shards // ep
    for what, number in (("width", config.width), ("hidden", config.hidden)):
        if number // layout.tp % alike:
            raise UserError(
                f"parallel.dp_shard * cp ÷ ep({alike}) does not divide the {number // layout.tp} "
                f"numbers of the model's {what} that a process has; raise parallel.ep"
            )
    if recipe.train.compile is True:
        raise UserError(
            f"train.compile: not with parallel.ep({ep}), whose exchanges can't be compiled; set "
            "auto or false"
        )
    adapted = recipe.adapter.kind != "none" and trains_experts(config, recipe.adapter)
    if recipe.train.optimizer == "adamw_8bit" and (layout.tp > 1 or adapted):
        beside = "adapters on experts" if adapted else f"parallel.tp({layout.tp})"
        raise UserError(
            f"train.optimizer = adamw_8bit: not with parallel.ep({ep}) and {beside}, whose rows "
            "are divided; set adamw or muon"
        )


def _check_paging(recipe: Recipe) -> None:
    instead = "set parallel.paged_moments = false"
    if recipe.train.optimizer != "adamw":
        raise UserError(
            f"parallel.paged_moments: not with train.optimizer = {recipe.train.optimizer}; "
            f"set adamw, or {instead}"
        )
    if recipe.parallel.cpu_offload:
        raise UserError(
            "parallel.paged_moments: parallel.cpu_offload keeps the moments in the host's memory "
            f"already, and updates the weights there; {instead}"
        )


def _check_products(config: DecoderConfig, recipe: Recipe) -> None:
    """Check that the compiler can overlap the exchanges of this model's blocks with products."""
    if recipe.train.compile is False:
        raise UserError(
            "parallel.async_tp: not with train.compile = false, as the compiler does it; set "
            "train.compile = true, or parallel.async_tp = false"
        )
    if recipe.train.precision == "fp8":
        raise UserError(
            "parallel.async_tp: not with train.precision = fp8, which rounds what was gathered "
            "before it is multiplied; set bf16, or parallel.async_tp = false"
        )
    if config.qkv_bias or config.output_bias or config.mlp_bias:
        raise UserError(
            "parallel.async_tp: not with a model whose products add biases, which the compiler "
            "can't overlap; set parallel.async_tp = false"
        )


def _check_blocks(config: DecoderConfig, tp: int, adapter: Adapter) -> None:
    """Check that what a process reads of a row of each quantised matrix is whole blocks."""
    # Adapters that are loaded have targets of their own.
    targets = adapter.targets if adapter.init_from is None else ()
    shapes = linear_shapes(config)
    blocks = {name: _NF4_BLOCK for name in shapes if not targets or name in targets}
    _check_whole(config, tp, blocks, "adapter.kind = qlora", "adapter.kind = lora")


def _check_moments(config: DecoderConfig, tp: int) -> None:
    """Check that what a process has of a row is whole blocks of moments in 8 bits."""
    blocks = {name: moments_block(row) for name, (_, row) in linear_shapes(config).items()}
    _check_whole(config, tp, blocks, "train.optimizer = adamw_8bit", "adamw")


def _check_mx(config: DecoderConfig, layout: Layout, length: int) -> None:
    """Check that a process's part of each product that mxfp8 rounds is whole blocks.

    Products sum over rows, columns and, for a weight's gradient, positions.
    """
    tp, cp = layout.tp, layout.cp
    if length // cp % MX_BLOCK:
        each = f" over parallel.cp({cp})" if cp > 1 else ""
        raise UserError(
            f"data.sequence_length({length}){each}: not with train.fp8_scaling = mx, whose blocks "
            f"are of {MX_BLOCK} positions; change it, or set rowwise"
        )
    for name, (rows, columns) in linear_shapes(config).items():
        divided = columns if name.endswith(BY_ROWS) else rows
        if not (rows % MX_BLOCK or columns % MX_BLOCK) and divided // tp % MX_BLOCK:
            raise UserError(
                f"parallel.tp({tp}): not with train.fp8_scaling = mx, whose blocks of {MX_BLOCK} "
                f"don't divide the {divided // tp} numbers of {name} that a process has; change "
                "parallel.tp, or set rowwise"
            )


def _check_whole(
    config: DecoderConfig, tp: int, blocks: dict[str, int], what: str, instead: str
) -> None:
    """Check that the blocks of rows, by matrix, divide the part of a row that a process has."""
    for name, block in blocks.items():
        columns = linear_shapes(config)[name][1]
        numbers = columns // tp if name.endswith(BY_ROWS) else columns
        if numbers % block:
            raise UserError(
                f"parallel.tp({tp}): not with {what}, whose blocks of {block} don't divide the "
                f"{numbers} numbers of a row of {name} that a process has; change parallel.tp, or "
                f"set {instead}"
            )


def linear_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of each matrix of a block by name."""
    return {name: (rows, columns) for name, (rows, columns, _) in config.matrices.items()}


def is_of_experts(config: DecoderConfig, name: str) -> bool:
    """Return whether each expert of a block has a matrix of that name."""
    return config.experts > 0 and name in _OF_EXPERTS


def adapted_matrices(config: DecoderConfig, adapter: Adapter) -> dict[str, tuple[int, int, int]]:
    """Return those of `config.matrices` that get an adapter; loaded ones have other targets."""
    matrices, targets = config.matrices, adapter.targets
    return {n: matrices[n] for n in matrices if not targets or n.rpartition(".")[2] in targets}


def trains_experts(config: DecoderConfig, adapter: Adapter) -> bool:
    """Return whether a mixture's experts are trained, or adapters beside them."""
    adapted = adapted_matrices(config, adapter)
    return adapter.kind == "none" or any(is_of_experts(config, name) for name in adapted)


def gathers_in_fp8(
    config: DecoderConfig,
    layout: Layout,
    precision: Precision,
    scaling: Fp8Scaling,
    *,
    offloaded: bool,
) -> bool:
    """Return whether shards of the blocks' matrices travel in fp8, as torchao's can.

    It takes one scale for each matrix, and what is offloaded loses it on its way to the GPU. Nor
    does FSDP2 fill up tensors like torchao's, so all processes must have equally many rows.
    """
    if precision != "fp8" or scaling != "tensorwise" or offloaded:
        return False
    ways = layout.tp * layout.shards
    return not any(rows % ways for rows, _ in linear_shapes(config).values())


def moments_block(columns: int) -> int:
    """Return how many numbers of a row share a scale in moments of 8 bits."""
    return gcd(columns, _MOMENTS_BLOCK)


def check_divisible(config: DecoderConfig, tp: int) -> None:
    """Raise UserError where `tp` processes can't have equally many heads and features."""
    for what in ("kv_heads", "hidden", "dense_hidden"):
        if (number := getattr(config, what)) % tp:
            raise UserError(f"parallel.tp({tp}) does not divide the model's {what}({number})")


def stage_layers(config: DecoderConfig, stages: int) -> tuple[range, ...]:
    """Return the layers of each stage, balanced by arithmetic.

    A token costs the head as many operations as it has numbers, like a layer; embeddings are only
    looked up.
    """
    head = config.vocab_size * config.width / config.active_layer_parameters
    return split_layers(config.layers, stages, after=head)
