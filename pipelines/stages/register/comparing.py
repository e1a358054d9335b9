"""What the compare page is made of: this run's outputs, and what the champion's run left."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pipelines.core.storage import write_text
from pipelines.evaluation.comparison_charts import Side
from pipelines.evaluation.comparison_page import compare_page
from pipelines.evaluation.loss_curve import CURVE, parse_curve
from pipelines.recipe.recipe import Recipe
from pipelines.registry import registry
from pipelines.run.records import EvaluateRecord, output_folder
from pipelines.run.verdict import Probes, Verdict
from pipelines.stages.costs import training_elsewhere
from pipelines.tracking import rest
from pipelines.tracking.run_search import read_artifact, read_run_artifact

PAGE = "compare.html"  # in register's output, and among the run's artifacts
_CURVE = f"{EvaluateRecord.stage}/{CURVE}"

S = TypeVar("S")
T = TypeVar("T")
_log = logging.getLogger(__name__)


def write_page(
    recipe: Recipe,
    workspace: Path,
    facts: Mapping[str, Any],
    verdict: Verdict,
    champion: registry.ModelVersion | None,
) -> Path:
    """Write the page of a verdict about this workspace's model, and return where.

    Args:
        recipe: The run's.
        workspace: With the outputs of evaluate.
        facts: The candidate's lineage.
        verdict: The gate's.
        champion: The version that was champion when the gate decided.
    """
    curve = output_folder(workspace, EvaluateRecord.stage) / CURVE
    record = EvaluateRecord.read(workspace)
    candidate = Side(
        name="candidate",
        facts=facts,
        curve=parse_curve(curve.read_text(encoding="utf-8")),
        training=training_elsewhere(facts),
        probes=record.probes,
    )
    path = output_folder(workspace, "register") / PAGE
    theirs = _side(champion) if champion else None
    write_text(path, compare_page(verdict, recipe.registration, record, candidate, theirs))
    return path


def _side(version: registry.ModelVersion) -> Side:
    """A registered model: what is known of it, for its files may be gone or another tool's."""
    address = rest.artifact_address(version.name, version.version)
    lineage = read_artifact(address, registry.LINEAGE)
    curve = read_run_artifact(version.run_id, _CURVE) if version.run_id else None
    facts = _parsed(json.loads, lineage, f"{registry.LINEAGE} of {version.label}") or {}
    side = Side(
        name=version.label,
        facts=facts,
        curve=_parsed(parse_curve, curve, f"{_CURVE} of {version.label}'s run"),
        training=training_elsewhere(facts),
    )
    found = side.fact("records", "evaluate", "probes")
    probes = _parsed(Probes.model_validate, found, f"what was looked for in {version.label}")
    return replace(side, probes=probes or Probes())


def _parsed(parse: Callable[[S], T], found: S | None, what: str) -> T | None:
    """None of what isn't there or is broken: a page on a champion does not stop its successor."""
    if found is None:
        return None
    try:
        return parse(found)
    except (ValueError, KeyError) as error:
        _log.warning("%s can't be read, so the page does without: %s", what, error)
        return None
