"""The model that training starts from."""

from pathlib import Path

import torch

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.models.model_folder import load_config
from pipelines.models.peft_format import adapt, fill_adapters
from pipelines.models.presets import preset
from pipelines.models.pretrained import load_weights
from pipelines.models.transformer import Transformer
from pipelines.recipe.recipe import Recipe


def model_shape(recipe: Recipe, vocab_size: int) -> DecoderConfig:
    """Return the shape of the recipe's model for the data's vocabulary."""
    base = recipe.model.init_from
    if base is None:
        return preset(recipe.model.preset).sized(vocab_size, recipe.data.sequence_length)
    shape = load_config(Path(base))
    if shape.vocab_size < vocab_size:
        raise UserError(
            f"model.init_from = {base}: its vocabulary is {shape.vocab_size}, but the data's is "
            f"{vocab_size}; preprocess with the model's own tokenizer (data.tokenizer.kind = "
            "pretrained); if that has no chat template, set data.instruction.chat_template to one "
            "without new tokens (ChatML has new tokens)"
        )
    return shape


def build_model(recipe: Recipe, shape: DecoderConfig) -> Transformer:
    """Return a decoder with its adapters, if any, on the meta device."""
    with torch.device("meta"):
        model = Transformer(shape)
        adapt(model, recipe)
    return model


def fill_model(recipe: Recipe, model: Transformer) -> None:
    """Load the weights of `model.init_from`, or initialise seeded ones, and fill the adapters."""
    if recipe.model.init_from is None:
        model.init_weights(recipe.seed)
    else:
        load_weights(model, Path(recipe.model.init_from))
        fill_adapters(model, recipe)
