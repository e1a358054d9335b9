"""What the contenders of `tokenize` share: the documents, and proof of their ids."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def documents(folder: Path) -> list[str]:
    """Every text."""
    with (folder / "documents.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def check(options: dict[str, Any], encoded: Iterable[Any]) -> None:
    """Stop unless each document, in order, has the ids that `tokenizers` gave it."""
    digest, tokens = hashlib.md5(usedforsecurity=False), 0
    for ids in encoded:
        listed = ids if isinstance(ids, list) else ids.tolist()
        digest.update(json.dumps(listed).encode())
        tokens += len(listed)
    if (tokens, digest.hexdigest()) != (options["tokens"], options["md5"]):
        raise SystemExit(f"{tokens} other token ids than the {options['tokens']} of tokenizers")
