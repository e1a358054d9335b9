"""What preprocess will read, by content: `source.json`, and so the stage cache's key."""

from typing import Any

from pipelines.core.recipe_data import Data
from pipelines.data.sources import fingerprint
from pipelines.data.tokenizer import tokenizer_fingerprint


def fingerprint_inputs(data: Data) -> dict[str, Any]:
    """Path, size and hash of every file of the source and of a pretrained tokenizer.

    Raises:
        UserError: a path does not exist, or nothing lies there.
    """
    return {
        "source": fingerprint(data.source),
        "tokenizer": tokenizer_fingerprint(data.tokenizer),
    }
