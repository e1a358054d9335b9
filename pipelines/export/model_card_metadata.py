"""What machines read of a model card: Hugging Face's YAML, in which results have intervals."""

import math
import re
from collections.abc import Iterator
from typing import Any

from pipelines.core.recipe import Recipe
from pipelines.core.records import DatasetRef, EvaluateRecord
from pipelines.core.verdict import Estimate

CONFIDENCE = 0.95  # of both bounds of an interval together, as the evaluate stage takes it
_LANGUAGE = re.compile(r"[a-z]{2,3}")  # ISO 639, and not `uncertain` or `other`


def metadata(recipe: Recipe, dataset: DatasetRef, evaluate: EvaluateRecord, family: str) -> str:
    """The front matter, between its `---` lines."""
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
    """What the data is called."""
    return dataset.label or recipe.data.source.path or "the Python standard library"


def _languages(evaluate: EvaluateRecord) -> list[str]:
    """Those that have a slice of their own."""
    names = (each.slice.name for each in evaluate.slices if each.slice.dimension == "language")
    return sorted(name for name in names if _LANGUAGE.fullmatch(name))


def _results(data: str, dataset: DatasetRef, evaluate: EvaluateRecord) -> Iterator[Any]:
    """An `EvalResult` of each figure that is a finite number."""
    from huggingface_hub import EvalResult

    def result(kind: str, name: str, value: float, **more: Any) -> Iterator[Any]:
        if math.isfinite(value):
            yield EvalResult(
                task_type="text-generation",
                dataset_type="held-out",
                dataset_name=f"Held-out documents of {data}",
                dataset_split="validation",
                dataset_revision=dataset.directory_hash,
                metric_type=kind,
                metric_name=name,
                metric_value=value,
                **more,
            )

    bits = "bits_per_byte", "Bits per byte"
    yield from result(*bits, evaluate.bits_per_byte, metric_args=_bounds(evaluate.interval))
    for each in evaluate.slices:
        found = each.bits_per_byte
        part = str(each.slice)
        yield from result(*bits, found.value, dataset_config=part, metric_args=_bounds(found))
    yield from result("perplexity", "Perplexity a token", evaluate.perplexity)
    for test in evaluate.behaviours:
        share = test.passed / test.cases
        kind = test.kind.replace("_", " ")
        yield from result("accuracy", f"{test.name} ({kind})", share)
    if answered := evaluate.exact_match:
        found = answered.share
        name = "Held-out questions, exact match"
        yield from result("exact_match", name, found.value, metric_args=_bounds(found))


def _bounds(found: Estimate | None) -> dict[str, float] | None:
    if found is None or found.lower is None or found.upper is None:
        return None
    return {"confidence": CONFIDENCE, "lower": found.lower, "upper": found.upper}
