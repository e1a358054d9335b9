"""Slices: parts of a set of documents, by source, language and length, that are scored separately.

A slice with few documents tells little, and among many slices one looks bad by chance. So the small
slices of a dimension are joined into one, and the number of slices is limited.
"""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipelines.core.storage import write_text
from pipelines.evaluation.bootstrap import bootstrap
from pipelines.run.verdict import Estimate, Slice, SliceScore

Dimension = Literal["source", "language", "length"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)  # columns of a table of scores
LEAST_DOCUMENTS = 20
OTHER = "other"
_MOST = 16  # slices of a dimension, besides `other`


@dataclass(frozen=True)
class Slices:
    """K slices, and which of N documents each one holds."""

    names: tuple[Slice, ...]
    members: npt.NDArray[np.bool_]  # [N, K]


def slices_of(scores: pa.Table) -> Slices:
    """Return the slices of a table of scores, by dimension, the largest first and `other` last.

    A dimension with only one slice is left out, because the slice would be all documents.
    """
    names: list[Slice] = []
    columns: list[npt.NDArray[np.bool_]] = []
    for dimension in DIMENSIONS:
        if dimension in scores.column_names:
            found = _parts(np.array(scores[dimension].to_pylist(), dtype=object))
            if len(found) > 1:
                names += [Slice(dimension=dimension, name=name) for name in found]
                columns += found.values()
    empty = np.zeros((len(scores), 0), bool)
    return Slices(tuple(names), np.stack(columns, axis=1) if columns else empty)


def score_slices(scores: pa.Table, confidence: float) -> tuple[Estimate, tuple[SliceScore, ...]]:
    """Return the bits per byte on all documents and each slice, with bounds of this confidence."""
    slices = slices_of(scores)
    members = np.concatenate([np.ones((len(scores), 1), bool), slices.members], axis=1)
    sizes = scores["bytes"].to_numpy().astype(np.float64)
    found = bootstrap(scores["nats"].to_numpy() / math.log(2), sizes, members)
    total, *estimates = (
        Estimate.of(*each) for each in zip(found.values, *found.bounds(confidence), strict=True)
    )
    return total, tuple(
        SliceScore(
            slice=name,
            documents=int(held.sum()),
            bytes=int(sizes[held].sum()),
            bits_per_byte=each,
        )
        for name, held, each in zip(slices.names, slices.members.T, estimates, strict=True)
    )


def write_slices(scores: Sequence[SliceScore], path: Path) -> None:
    """Write a CSV file for `dvc plots`, one row a slice; a missing bound is an empty cell."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("slice", "documents", "bytes", "bits_per_byte", "lower", "upper"))
    for each in scores:
        found = each.bits_per_byte
        figures = (found.value, found.lower, found.upper)
        rows.writerow((str(each.slice), each.documents, each.bytes, *figures))
    write_text(path, text.getvalue())


def _parts(labels: npt.NDArray[np.object_]) -> dict[str, npt.NDArray[np.bool_]]:
    """Return the documents of each label that has enough of them, and all others together."""
    values, counts = np.unique(labels, return_counts=True)
    largest = sorted(zip(-counts, values, strict=True))[:_MOST]
    kept = [value for less, value in largest if -less >= LEAST_DOCUMENTS and value != OTHER]
    parts = {str(value): labels == value for value in kept}
    rest = ~np.isin(labels, kept)
    return parts | {OTHER: rest} if rest.sum() >= LEAST_DOCUMENTS else parts
