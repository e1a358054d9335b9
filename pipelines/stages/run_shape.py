"""The shape of a recipe's model before its data are there."""

from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.recipe import Recipe
from pipelines.models.config import DecoderConfig
from pipelines.models.folder import load_config
from pipelines.models.presets import preset

_BYTES = 257  # ids of single bytes, and one that ends a document; characters are fewer as a rule


def shape_beforehand(recipe: Recipe) -> DecoderConfig:
    """What `stages/train.py` will train, as far as a recipe tells.

    Raises:
        UserError: no such preset, or no folder to start from.
    """
    tokenizer, base = recipe.data.tokenizer, recipe.model.init_from
    if base is not None:
        if not Path(base).is_dir():
            raise UserError(
                f"model.init_from = {base}: no such folder; planning reads its config.json, or "
                "takes the shape of a preset: --model"
            )
        return load_config(Path(base))
    shape = preset(recipe.model.preset)
    vocabulary = {"bpe": tokenizer.vocab_size, "pretrained": shape.vocab_size}
    size = vocabulary.get(tokenizer.kind) or _BYTES
    return shape.sized(size, recipe.data.sequence_length)
