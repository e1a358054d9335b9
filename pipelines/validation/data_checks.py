"""Which frames the data gate holds against which suites."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pipelines.core.checked_json import read_model
from pipelines.core.storage import read_json
from pipelines.data.tally import STATS
from pipelines.data.tokens.token_shards import LENGTH_HISTOGRAM
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import parse_recipe
from pipelines.run.records import DatasetRef, MixturePart, PreprocessRecord, output_folder
from pipelines.validation import frames, suites
from pipelines.validation.runner import Check

PREVIOUS = "previous.json"  # in a workspace: statistics of the dataset version before


def build_checks(recipe: Recipe, workspace: Path) -> list[Check]:
    """Return the checks of what preprocess left in a workspace: of each dataset, and of several
    together.

    Raises:
        UserError: a part of a mixture was made by a recipe that can't be read any more.
    """
    preprocess = output_folder(workspace, PreprocessRecord.stage)
    dataset = PreprocessRecord.read(workspace).dataset
    if not dataset.mixture:
        documents = frames.measure_documents(preprocess, recipe.validation, pairs=dataset.pairs)
        checks = list(_dataset_checks(recipe, preprocess, dataset, documents))
        return checks + list(_drift_check(recipe, workspace, preprocess, dataset))
    return list(_mixture_checks(recipe, preprocess, dataset.mixture))


def _mixture_checks(
    recipe: Recipe, preprocess: Path, parts: tuple[MixturePart, ...]
) -> Iterator[Check]:
    """Yield each version's own checks, by the recipe that made it, and that no split leaks to
    another.
    """
    measured = []
    for part in parts:
        folder = preprocess / part.folder
        made = parse_recipe(recipe.to_dict() | {"data": part.data}, where=part.label)
        record = read_model(folder / "record.json", PreprocessRecord)
        pairs = record.dataset.pairs
        found = frames.measure_documents(folder, recipe.validation, len(parts), pairs=pairs)
        measured.append(found)
        for check in _dataset_checks(made, folder, record.dataset, measured[-1]):
            yield replace(check, name=f"{part.label}: {check.name}")
    frame, groups = frames.split_members(measured)
    yield Check(
        "mixture",
        "The documents of each split of all datasets together, each once.",
        frame,
        suites.mixture_suite(),
        groups,
    )


def _dataset_checks(
    recipe: Recipe, preprocess: Path, dataset: DatasetRef, documents: frames.Documents
) -> Iterator[Check]:
    yield Check(
        "documents",
        f"{_count(len(documents.frame), documents)}, measured as they lie on disk.",
        documents.frame,
        suites.documents_suite(recipe.validation),
        documents.groups,
    )
    if dataset.pairs:
        yield Check(
            "pairs",
            f"{_count(len(documents.frame), documents)}, each a chosen and a rejected answer, or, "
            "if they are labelled, one of the two.",
            documents.frame,
            suites.pairs_suite(recipe.validation, labelled=dataset.labelled),
            documents.groups,
        )
    yield Check(
        "texts",
        f"{_count(len(documents.sample), documents)}; of each the first "
        f"{frames.SAMPLE_CHARACTERS:,} characters.",
        documents.sample,
        suites.texts_suite(recipe, preprocess),
    )
    yield Check(
        "shards",
        "Each token shard: its files, its index and its ids.",
        frames.shard_frame(preprocess, dataset),
        suites.shards_suite(dataset.vocab_size),
    )
    yield Check(
        "splits",
        "Training and validation: what the record, the statistics and the files say.",
        frames.split_frame(preprocess, dataset, read_json(preprocess / STATS), documents),
        suites.splits_suite(recipe.validation, packed=dataset.packed_length is not None),
    )


def _drift_check(
    recipe: Recipe, workspace: Path, preprocess: Path, dataset: DatasetRef
) -> Iterator[Check]:
    """Yield where there is a version before."""
    path = workspace / PREVIOUS
    previous: list[int] = read_json(path).get(LENGTH_HISTOGRAM, []) if path.is_file() else []
    if previous:
        about = "Documents' lengths in tokens, beside those of the version before."
        frame = frames.length_frame(preprocess, dataset)
        yield Check("lengths", about, frame, suites.lengths_suite(recipe.validation, previous))


def _count(rows: int, documents: frames.Documents) -> str:
    if rows == documents.total:
        return f"All {documents.total:,} documents"
    return f"{rows:,} of {documents.total:,} documents, chosen by a hash of their content"
