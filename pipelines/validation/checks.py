"""Which frames the data gate holds against which suites."""

from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.core.recipe import Recipe
from pipelines.core.records import PreprocessRecord, output_folder
from pipelines.core.storage import read_json
from pipelines.data.tally import STATS
from pipelines.data.tokens.lengths import LENGTH_HISTOGRAM
from pipelines.validation import frames, suites
from pipelines.validation.runner import Check

if TYPE_CHECKING:
    import pandas as pd

PREVIOUS = "previous.json"  # in a workspace: statistics of the dataset version before


def build_checks(recipe: Recipe, workspace: Path, documents: frames.Documents) -> list[Check]:
    """The checks of what preprocess left in a workspace."""
    preprocess = output_folder(workspace, PreprocessRecord.stage)
    dataset = PreprocessRecord.read(workspace).dataset
    checks = [
        Check(
            "documents",
            f"{_count(documents.frame, documents)}, measured as they lie on disk.",
            documents.frame,
            suites.documents_suite(recipe.validation),
        ),
        Check(
            "texts",
            f"{_count(documents.sample, documents)}; of each the first "
            f"{frames.SAMPLE_CHARACTERS:,} characters.",
            documents.sample,
            suites.texts_suite(recipe, preprocess),
        ),
        Check(
            "shards",
            "Each token shard: its files, its index and its ids.",
            frames.shard_frame(preprocess, dataset),
            suites.shards_suite(dataset.vocab_size),
        ),
        Check(
            "splits",
            "Training and validation: what the record, the statistics and the files say.",
            frames.split_frame(preprocess, dataset, read_json(preprocess / STATS), documents),
            suites.splits_suite(recipe.validation, packed=dataset.packed_length is not None),
        ),
    ]
    if previous := _previous_lengths(workspace):
        about = "Documents' lengths in tokens, beside those of the version before."
        frame = frames.length_frame(preprocess, dataset)
        checks.append(
            Check("lengths", about, frame, suites.lengths_suite(recipe.validation, previous))
        )
    return checks


def _count(frame: "pd.DataFrame", documents: frames.Documents) -> str:
    if len(frame) == documents.total:
        return f"All {documents.total:,} documents"
    return f"{len(frame):,} of {documents.total:,} documents, chosen by a hash of their content"


def _previous_lengths(workspace: Path) -> list[int]:
    path = workspace / PREVIOUS
    lengths: list[int] = read_json(path).get(LENGTH_HISTOGRAM, []) if path.is_file() else []
    return lengths
