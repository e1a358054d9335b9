"""Refuses recipes that the engine can't run before anything starts; it does not import torch."""

from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.loading.sampler import check_batch
from pipelines.models.config import DecoderConfig
from pipelines.models.model_folder import load_config, weight_files
from pipelines.models.presets import preset
from pipelines.parallel.division import check_division
from pipelines.parallel.layout import Layout, resolve_layout
from pipelines.planning.attention_rule import why_not_flash
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.section import registered_label


def check_recipe(recipe: Recipe) -> None:
    """Check that the training engine can run a recipe.

    Raises:
        UserError: one line with the key, its value and what to set instead.
    """
    layouts = _check_workers(recipe)
    if recipe.train.precision == "fp8" and recipe.train.compile is False:
        raise UserError(
            "train.precision = 'fp8': without train.compile = true it is slower than bf16, as each "
            "tensor is scaled and rounded by kernels of its own; set that, or bf16"
        )
    _check_adapter(recipe)
    if recipe.preference.needs_reference and recipe.model.init_from is None:
        raise UserError(
            f"preference.kind = {recipe.preference.kind!r} compares with the model that training "
            "starts from; set model.init_from, or orpo or simpo"
        )
    if recipe.reinforcement.is_on and recipe.model.init_from is None:
        raise UserError(
            "reinforcement.kind = 'grpo': a model that answers at random learns nothing from "
            "rewards; set model.init_from"
        )
    check_attention(recipe)
    if registered_label(recipe.model.init_from):
        return  # a run is checked once more when it has the model's folder
    config = _shape(recipe)
    check_attention(recipe, config)
    for layout in layouts:
        check_division(config, layout, recipe)


def check_attention(recipe: Recipe, config: DecoderConfig | None = None) -> None:
    """Check that `varlen_attn`, if the recipe sets it, takes this precision and this shape.

    A precision that is still `auto` is checked once more when it is settled.

    Raises:
        UserError: one line with what it does not take.
    """
    train = recipe.train
    if train.attention == "varlen" and (why := why_not_flash(config, train.precision)):
        raise UserError(f"train.attention = varlen: {why}; change that, or set flex")


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
            f"adapter.kind = {adapter.kind!r}: random weights can't be adapted; set "
            "model.init_from to a Hugging Face folder, or adapter.kind = none"
        )
    if recipe.train.precision == "fp8":
        raise UserError("train.precision = 'fp8': adapters can't be trained in fp8; set bf16")


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
    """Check that each worker count gives every process samples, and return the layouts."""
    least, most = recipe.resources.worker_range
    layouts = []
    if not recipe.parallel.by_rule:
        layouts = [resolve_layout(recipe.parallel, n) for n in range(least, most + 1)]
    shares = max((layout.dp for layout in layouts), default=most)
    check_batch(recipe.train.global_batch_size, shares)
    return layouts
