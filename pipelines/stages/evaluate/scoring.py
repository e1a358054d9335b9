"""Scoring of model folders on the held-out documents, in parts that may run anywhere."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import call
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.data.passes import MapOrdered
from pipelines.run.progress import ProgressMeter

if TYPE_CHECKING:
    import pyarrow as pa

PART_BYTES = 128 << 10  # text per scoring task; about 2 s with 1M parameters on one core


class Scoring:
    """The scoring of documents in parts, which reports how much of their text is scored."""

    def __init__(
        self,
        documents: "pa.Table",
        of_datasets: "dict[str, pa.Table]",
        stride: float,
        progress: ProgressMeter,
    ) -> None:
        """Divide the documents into parts; nothing is scored yet.

        Args:
            documents: All documents to score.
            of_datasets: The documents of each dataset of a mixture, by its label.
            stride: The stride of the windows, as a share of the context.
            progress: Records how much text is scored.
        """
        import pyarrow as pa

        from pipelines.evaluation.held_out_documents import (
            part_documents,
            scored_texts,
            source_labels,
        )

        labels = pa.array(source_labels(documents, of_datasets), pa.string())
        labelled = documents.drop_columns("source").append_column("source", labels)
        self._parts = part_documents(labelled, PART_BYTES)
        self._total = sum(len(text.encode()) for text in scored_texts(documents)) / 1024
        self._stride, self._progress = stride, progress
        progress.write(0, self._total, "KiB scored")

    def tasks(self, model: Path) -> list[Callable[[], "pa.Table"]]:
        """Return one task for each part, which returns the part's scores."""
        return [partial(_score, model, part, self._stride) for part in self._parts]

    def joined(self, scored: Iterator["pa.Table"]) -> "pa.Table":
        """Return all scores of one folder, and report progress as its parts arrive."""
        import pyarrow as pa

        return pa.concat_tables(self._reported(scored, self._total))

    def folders(self, map_ordered: MapOrdered, models: Sequence[Path]) -> "list[pa.Table]":
        """Return the scores of each folder; the parts of all folders are scored in parallel."""
        import pyarrow as pa

        tasks = [self.tasks(model) for model in models]
        parts: Iterator[Any] = map_ordered(call, [task for of_model in tasks for task in of_model])
        reported = self._reported(parts, self._total * len(models))
        return [pa.concat_tables(islice(reported, len(of_model))) for of_model in tasks]

    def _reported(self, scored: Iterator["pa.Table"], total: float) -> Iterator["pa.Table"]:
        done = 0.0
        for part in scored:
            done += sum(part["bytes"].to_pylist()) / 1024
            self._progress.write(done, total, "KiB scored", force=done == total)
            yield part


def _score(model: Path, documents: "pa.Table", stride: float) -> "pa.Table":
    from pipelines.evaluation.held_out_documents import with_labels
    from pipelines.evaluation.perplexity import score_documents

    return with_labels(score_documents(model, documents, stride), documents)
