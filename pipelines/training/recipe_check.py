"""What the engine can't do is refused before anything starts; no torch here."""

from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.models.model_folder import load_config, weight_files
from pipelines.models.presets import preset
from pipelines.parallel.division import check_division
from pipelines.parallel.layout import Layout, resolve_layout
from pipelines.recipe.recipe import Recipe


def check_recipe(recipe: Recipe) -> None:
    """Check that the training engine can run a recipe.

    Raises:
        UserError: one line with the key, its value and what can be had instead.
    """
    layouts = _check_workers(recipe)
    _check_adapter(recipe)
    config = _shape(recipe)
    for layout in layouts:
        check_division(config, layout, recipe)


def _check_adapter(recipe: Recipe) -> None:
    adapter = recipe.adapter
    if adapter.kind == "none":
        if adapter.init_from is not None:
            raise UserError(
                f"adapter.init_from = {adapter.init_from}: there are no adapters with "
                "adapter.kind = none; set lora or qlora"
            )
        return
    if recipe.model.init_from is None:
        raise UserError(
            f"adapter.kind = {adapter.kind!r}: a model of random weights is nothing to adapt; set "
            "model.init_from to a Hugging Face folder, or adapter.kind = none"
        )
    if recipe.train.precision == "fp8":
        raise UserError("train.precision = 'fp8': not with adapters; set bf16")


def _shape(recipe: Recipe) -> DecoderConfig:
    if recipe.model.init_from is None:
        return preset(recipe.model.preset)
    folder, length = Path(recipe.model.init_from), recipe.data.sequence_length
    config = load_config(folder)
    if config.context_length < length:
        raise UserError(
            f"model.init_from = {folder}: its context is {config.context_length} tokens, but "
            f"data.sequence_length = {length}; set at most {config.context_length}"
        )
    weight_files(folder)
    return config


def _check_workers(recipe: Recipe) -> list[Layout]:
    """Every number of workers that there may be must give a layout with samples for all."""
    least, most = recipe.resources.worker_range
    layouts = []
    if not recipe.parallel.by_rule:
        layouts = [resolve_layout(recipe.parallel, n) for n in range(least, most + 1)]
    shares = max((layout.dp for layout in layouts), default=most)
    if recipe.train.global_batch_size < shares:
        raise UserError(
            f"train.global_batch_size({recipe.train.global_batch_size}) is smaller than the "
            f"{shares} data-parallel processes of resources.workers({most}): each needs at least "
            "one sample a step"
        )
    return layouts
