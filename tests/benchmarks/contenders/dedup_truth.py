"""The corpus of the dedup benchmark, and how well what was dropped agrees with what was planted."""

from collections.abc import Collection
from pathlib import Path


def read_texts(folder: Path) -> list[str]:
    return (folder / "texts.txt").read_text(encoding="utf-8").splitlines()


def read_planted(folder: Path) -> set[int]:
    """The numbers of the documents that are to be dropped."""
    truth = (folder / "truth.txt").read_text()
    return {number for number, mark in enumerate(truth) if mark == "1"}


def score(planted: set[int], dropped: Collection[int]) -> dict[str, float]:
    """Precision, recall and their harmonic mean."""
    right = len(planted.intersection(dropped))
    precision, recall = right / len(dropped), right / len(planted)
    f1 = 2 * precision * recall / (precision + recall)
    return {"f1": f1, "precision": precision, "recall": recall}
