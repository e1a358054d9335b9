"""What the engine can't do yet is refused before anything starts; no torch here."""

from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.recipe import Recipe
from pipelines.models.folder import load_config, weight_files
from pipelines.models.presets import preset


def supported(recipe: Recipe) -> None:
    """Check that the training engine can run a recipe.

    Raises:
        UserError: one line with the key, its value and what can be had instead.
    """
    parallel = recipe.parallel
    for key, value in (("dp_shard", parallel.dp_shard), ("tp", parallel.tp), ("pp", parallel.pp)):
        if value not in (1, "auto"):
            raise UserError(f"parallel.{key} = {value}: only data-parallel replicas so far; set 1")
    if parallel.sharding != "none":
        raise UserError(f"parallel.sharding = {parallel.sharding!r}: not supported yet; set none")
    if recipe.adapter.kind != "none":
        raise UserError(f"adapter.kind = {recipe.adapter.kind!r}: not supported yet; set none")
    if recipe.train.precision in ("fp16", "fp8"):
        raise UserError(
            f"train.precision = {recipe.train.precision!r}: not supported yet; set fp32 or bf16"
        )
    _check_workers(recipe)
    if recipe.model.init_from is None:
        preset(recipe.model.preset)
    else:
        _check_init_from(Path(recipe.model.init_from), recipe.data.sequence_length)


def _check_init_from(folder: Path, sequence_length: int) -> None:
    context = load_config(folder).context_length
    if context < sequence_length:
        raise UserError(
            f"model.init_from = {folder}: its context is {context} tokens, but "
            f"data.sequence_length = {sequence_length}; set at most {context}"
        )
    weight_files(folder)


def _check_workers(recipe: Recipe) -> None:
    workers, replicas = recipe.resources.workers, recipe.parallel.dp_replicate
    if replicas not in ("auto", workers):
        raise UserError(
            f"parallel.dp_replicate({replicas}) must equal resources.workers({workers}), or be auto"
        )
    most = workers if isinstance(workers, int) else workers[1]
    if recipe.train.global_batch_size < most:
        raise UserError(
            f"train.global_batch_size({recipe.train.global_batch_size}) is smaller than "
            f"resources.workers({most}): each needs at least one sample a step"
        )
