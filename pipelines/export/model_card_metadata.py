"""The machine-readable part of a model card: Hugging Face's YAML, with results and intervals."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipelines.data.reading.sources import describe
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import DatasetRef, EvaluateRecord
from pipelines.run.verdict import Estimate, Probes

CONFIDENCE = 0.95  # of both bounds of an interval together, as in the evaluate stage
_LANGUAGE = re.compile(r"[a-z]{2,3}")  # ISO 639 codes, not `uncertain` or `other`


def metadata(recipe: Recipe, dataset: DatasetRef, evaluate: EvaluateRecord, family: str) -> str:
    """Return the front matter with its `---` lines."""
    from huggingface_hub import ModelCardData

    source = recipe.data.source
    card = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=recipe.registration.license,
        language=_languages(evaluate) or None,
        datasets=[str(source.path)] if source.kind == "huggingface" else None,
        tags=["penstock", family],
        model_name=recipe.registration.model_name,
        eval_results=list(_results(data_name(recipe, dataset), dataset, evaluate)),
    )
    return f"---\n{card.to_yaml()}\n---\n"


def data_name(recipe: Recipe, dataset: DatasetRef) -> str:
    """Return the name of the data."""
    return dataset.label or describe(recipe.data.source)


def _languages(evaluate: EvaluateRecord) -> list[str]:
    """Return the languages that have a slice of their own."""
    names = (each.slice.name for each in evaluate.slices if each.slice.dimension == "language")
    return sorted(name for name in names if _LANGUAGE.fullmatch(name))


def _results(data: str, dataset: DatasetRef, evaluate: EvaluateRecord) -> Iterator[Any]:
    """Yield an `EvalResult` for each figure that is a finite number."""
    held_out = {
        "dataset_type": "held-out",
        "dataset_name": f"Held-out documents of {data}",
        "dataset_split": "validation",
        "dataset_revision": dataset.directory_hash,
    }
    training = held_out | {
        "dataset_type": "training",
        "dataset_name": f"Training documents of {data}",
        "dataset_split": "train",
    }
    bits = "bits_per_byte", "Bits per byte"
    yield from _result(held_out, *bits, evaluate.bits_per_byte, _bounds(evaluate.interval))
    for each in evaluate.slices:
        part = held_out | {"dataset_config": str(each.slice)}
        yield from _estimated(part, *bits, each.bits_per_byte)
    yield from _result(held_out, "perplexity", "Perplexity a token", evaluate.perplexity)
    if answered := evaluate.exact_match:
        name = "Held-out questions, exact match"
        yield from _estimated(held_out, "exact_match", name, answered.share)
    yield from _tests(evaluate)
    yield from _probes(evaluate.probes, training, held_out)


def _tests(evaluate: EvaluateRecord) -> Iterator[Any]:
    cases = {"dataset_type": "behavioural-tests", "dataset_name": "Test cases of the recipe"}
    for test in evaluate.behaviours:
        name = f"{test.name} ({test.kind.replace('_', ' ')})"
        yield from _result(cases, "accuracy", name, test.passed / test.cases)
    for each in evaluate.harness:
        task = {"dataset_type": each.task, "dataset_name": each.task}
        error = None if each.stderr is None else {"stderr": each.stderr}
        yield from _result(task, each.metric, each.metric, each.value, error)


def _probes(
    probes: Probes, training: Mapping[str, Any], held_out: Mapping[str, Any]
) -> Iterator[Any]:
    for each in probes.bias or ():
        sentences = {
            "dataset_type": "bias-templates",
            "dataset_name": f"Counterfactual sentences, {each.name}",
            "dataset_config": each.name,
        }
        name = "Preference for stereotypes, bits a sentence"
        yield from _estimated(sentences, "stereotype_preference", name, each.preference)
    if memorised := probes.memorisation:
        lengths = f"{memorised.continuation_tokens} tokens after {memorised.prefix_tokens}"
        name = f"Passages extracted verbatim, {lengths}"
        for data, part in ((training, memorised.training), (held_out, memorised.held_out)):
            if part.share:
                yield from _estimated(data, "extraction_rate", name, part.share)
    if (leaked := probes.leakage) and (share := leaked.share):
        name = "Texts that leak personal data"
        yield from _estimated(training, "leakage_rate", name, share)


def _estimated(data: Mapping[str, Any], kind: str, name: str, found: Estimate) -> Iterator[Any]:
    yield from _result(data, kind, name, found.value, _bounds(found))


def _result(
    data: Mapping[str, Any],
    kind: str,
    name: str,
    value: float,
    args: dict[str, float] | None = None,
) -> Iterator[Any]:
    from huggingface_hub import EvalResult

    if math.isfinite(value):
        yield EvalResult(
            task_type="text-generation",
            metric_type=kind,
            metric_name=name,
            metric_value=value,
            metric_args=args,
            **data,
        )


def _bounds(found: Estimate | None) -> dict[str, float] | None:
    if found is None or found.lower is None or found.upper is None:
        return None
    return {"confidence": CONFIDENCE, "lower": found.lower, "upper": found.upper}
