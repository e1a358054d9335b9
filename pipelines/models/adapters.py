"""The adapters that a recipe asks for: new ones, or those of a folder in peft's format."""

from pathlib import Path

import torch

from pipelines.core.recipe import Recipe
from pipelines.models.lora import add_adapters, chosen_sizes, init_adapters
from pipelines.models.peft_format import load_adapter, stored_sizes
from pipelines.models.transformer import Transformer
from pipelines.models.weights import COMPUTE_DTYPES


def adapt(model: Transformer, recipe: Recipe) -> None:
    """Freeze a model and add the recipe's adapters, if any, in place; best on the meta device.

    What is frozen lies in the type that it is computed in.

    Raises:
        UserError: a target is no layer of this model, or `adapter.init_from` is of another one.
    """
    adapter = recipe.adapter
    if adapter.kind == "none":
        return
    if adapter.init_from is None:
        sizes = chosen_sizes(model, adapter)
    else:
        sizes = stored_sizes(Path(adapter.init_from), model.config)
    add_adapters(model, sizes, adapter, COMPUTE_DTYPES.get(recipe.train.precision, torch.float32))


def fill_adapters(model: Transformer, recipe: Recipe) -> None:
    """Give the adapters, if any, their first values: from the seed, or from the folder."""
    if recipe.adapter.init_from is None:
        init_adapters(model, recipe.seed)
    else:
        load_adapter(model, Path(recipe.adapter.init_from))
