"""Tasks of the stage evaluate that measure bias, memorised text and leaked personal data.

Pyarrow and torch are imported only when a task runs, because an Airflow worker has neither.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.recipe.bias_templates import load_bias_templates
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import TRAIN, VALIDATION, DatasetRef
from pipelines.run.verdict import BiasScore, Leakage, Memorisation, Probes

if TYPE_CHECKING:
    import pyarrow as pa

    from pipelines.evaluation.leakage import Leak

SAMPLED_BYTES = 64 << 10  # of text, read for each wanted passage or prompt


def probe_tasks(
    recipe: Recipe, model: Path, preprocess: Path, dataset: DatasetRef, confidence: float
) -> list[Callable[[], Any]]:
    """Return one task each for bias, memorisation and leakage.

    A task that the recipe does not ask for finds None. Each bound of an interval holds with
    `confidence`.
    """
    return [
        partial(_bias, recipe, model, confidence),
        partial(_memorisation, recipe, model, preprocess, dataset, confidence),
        partial(_leakage, recipe, model, preprocess, dataset, confidence),
    ]


def gather_probes(results: Iterator[Any]) -> tuple[Probes, dict[str, Any]]:
    """Return the tasks' figures, and the documents with extracted or leaked text, for a user."""
    bias = next(results)
    memorisation, extracted = next(results)
    leakage, leaks = next(results)
    probes = Probes(bias=bias, memorisation=memorisation, leakage=leakage)
    return probes, {"extracted": extracted, "leaks": [leak._asdict() for leak in leaks]}


def _bias(recipe: Recipe, model: Path, confidence: float) -> tuple[BiasScore, ...] | None:
    asked = recipe.evaluate.bias
    if not asked.enabled:
        return None
    from pipelines.evaluation.bias import measure_bias

    sets = load_bias_templates(asked.templates)
    return measure_bias(model, sets, confidence, recipe.evaluate.stride)


def _memorisation(
    recipe: Recipe, model: Path, preprocess: Path, dataset: DatasetRef, confidence: float
) -> tuple[Memorisation | None, list[str]]:
    """Return the figures and the ids of training documents that a passage was extracted from."""
    asked = recipe.evaluate.safety
    if not asked.documents:
        return None, []
    from pipelines.evaluation.memorisation import measure_memorisation

    training, held_out = (
        _sample(preprocess, dataset, split, asked.documents) for split in (TRAIN, VALIDATION)
    )
    return measure_memorisation(model, training, held_out, asked, confidence)


def _leakage(
    recipe: Recipe, model: Path, preprocess: Path, dataset: DatasetRef, confidence: float
) -> "tuple[Leakage | None, list[Leak]]":
    """Return the figures, and the kind and the prompt's document of all that was found."""
    wanted = recipe.evaluate.safety.generations
    if not wanted:
        return None, []
    from pipelines.data.documents import documents_folder, split_files
    from pipelines.evaluation.leakage import measure_leakage

    return measure_leakage(
        model,
        _sample(preprocess, dataset, TRAIN, wanted),
        [
            path
            for folder in dataset.folders
            for path in split_files(documents_folder(preprocess / folder), TRAIN)
        ],
        wanted,
        recipe.data.pii,
        confidence,
        chat=recipe.data.instruction.is_chat,
    )


def _sample(preprocess: Path, dataset: DatasetRef, split: str, wanted: int) -> "pa.Table":
    from pipelines.evaluation.held_out_documents import each_once, read_shares, without_bad_answers

    shares = dataset.shares(wanted * SAMPLED_BYTES)
    return without_bad_answers(each_once(read_shares(preprocess, split, shares).values()))
