"""Fingerprints of all that preprocess reads: `source.json`, a part of the stage cache's key."""

from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError
from pipelines.core.storage import md5
from pipelines.data.cleaning.decontaminate import set_names
from pipelines.data.reading.sources import fingerprint
from pipelines.data.tokens.tokenizer import tokenizer_fingerprint
from pipelines.recipe.data_section import Data, Source


def fingerprint_inputs(data: Data) -> dict[str, Any]:
    """Return path, size and hash of the source's files, and all else that affects the dataset.

    This includes the length to which samples are packed, but only if `data.packing` is best_fit:
    documents stored end to end serve every `data.sequence_length`.

    Raises:
        UserError: A path does not exist or holds no file.
    """
    sets = data.decontamination.against
    return {
        "source": fingerprint(data.source),
        "tokenizer": tokenizer_fingerprint(data.tokenizer),
        "chat_template": _template_fingerprint(data.instruction.chat_template),
        "evaluation_sets": [
            {"name": name, **fingerprint(evaluation_source(data, path))}
            for name, path in zip(set_names(sets), sets, strict=True)
        ],
        "packed_length": data.sequence_length if data.packing == "best_fit" else None,
    }


def evaluation_source(data: Data, path: str) -> Source:
    """Return an evaluation set as a source that is read like the recipe's own source."""
    return Source(kind="files", path=path, text_field=data.source.text_field)


def _template_fingerprint(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return md5(Path(path).expanduser())
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); fix data.instruction.chat_template"
        ) from error
