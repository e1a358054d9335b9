"""What both sides of `evaluate` score, and the sums that they show of it."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_texts(folder: Path, options: dict[str, Any]) -> list[str]:
    """The case's documents."""
    texts: list[str] = json.loads((folder / "documents.json").read_text())
    return texts[: options["documents"]]


def sums(nats: Sequence[float], texts: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Nats of all documents, and of those of one window, on which both sides agree."""
    short = [each for each, text in zip(nats, texts, strict=True) if len(text) <= options["short"]]
    return {"nats of short": math.fsum(short), "nats": math.fsum(nats)}
