"""The model that training starts from."""

import math
from pathlib import Path

import torch

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.models.lora import adapted_layers, init_adapters
from pipelines.models.model_folder import load_config
from pipelines.models.peft_format import adapt, fill_adapters
from pipelines.models.presets import preset
from pipelines.models.pretrained import load_weights, named_places
from pipelines.models.transformer import Transformer
from pipelines.models.weights import Place, fill, named_generator
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


def build_model(
    recipe: Recipe, shape: DecoderConfig, whole: DecoderConfig | None = None
) -> Transformer:
    """Return a decoder with its adapters, if any, on the meta device; `whole` is as for `adapt`."""
    with torch.device("meta"):
        model = Transformer(shape)
        adapt(model, recipe, whole)
    return model


def fill_model(recipe: Recipe, model: Transformer) -> None:
    """Load the weights of `model.init_from`, or initialise seeded ones, and fill the adapters."""
    if recipe.model.init_from is None:
        model.init_weights(recipe.seed)
    else:
        load_weights(model, Path(recipe.model.init_from))
        fill_adapters(model, recipe)


def fill_randomly(model: Transformer, seed: int, *, trained: bool = False) -> None:
    """Draw all weights from a seed, also those below adapters, which `fill_model` only reads.

    Adapters change something where they count as `trained`; new ones change nothing.
    """
    if not (adapted := adapted_layers(model)):
        model.init_weights(seed)
        return
    model.after_to_empty()

    def draw(name: str, place: Place) -> None:
        generator = named_generator(seed, name, place.device)
        numbers = torch.randn(place.shape, generator=generator, device=generator.device)
        is_norm = name.endswith("norm.weight")
        fill(place, torch.ones_like(numbers) if is_norm else numbers / math.sqrt(place.shape[-1]))

    for name, place in named_places(model).items():
        draw(name, place)
    init_adapters(model, seed)
    if trained:
        for name, layer in adapted.items():
            draw(f"{name}.lora_b", layer.lora_b.weight)
