"""Compares the candidate with the champion: scores of both, and the data of the compare page.

Scores on held-out documents are computed once for all runs and lie in `scores/` of the home folder.
A file's name holds the hashes of the model and the documents, so scores are never out of date.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from pipelines.core.settings import load_settings
from pipelines.core.storage import write_text
from pipelines.data.documents import documents_folder, split_files
from pipelines.evaluation.comparison_charts import Side
from pipelines.evaluation.comparison_page import compare_page
from pipelines.evaluation.gate import Measured
from pipelines.evaluation.loss_curve import CURVE, parse_curve
from pipelines.recipe.recipe import Recipe
from pipelines.registry import registry
from pipelines.run.records import VALIDATION, EvaluateRecord, PreprocessRecord, output_folder
from pipelines.run.verdict import BehaviourScore, Probes, Verdict
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
    """Write the page of a verdict about this workspace's model, and return the page's path.

    Args:
        recipe: The run's recipe.
        workspace: A workspace with the outputs of evaluate.
        facts: The candidate's lineage.
        verdict: The gate's verdict.
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
    """Return what is known of a registered model; its files may be gone or from another tool."""
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
    probes = _parsed(Probes.model_validate, found, f"the probes of {version.label}")
    return replace(side, probes=probes or Probes())


def _parsed(parse: Callable[[S], T], found: S | None, what: str) -> T | None:
    """Return the parsed value; None if it is missing or broken, which must not stop a candidate."""
    if found is None:
        return None
    try:
        return parse(found)
    except (ValueError, KeyError) as error:
        _log.warning("%s can't be read, so the page doesn't show it: %s", what, error)
        return None


SCORES = "scores"  # under the home: <model hash>/<documents>.parquet


def measure_champion(
    recipe: Recipe,
    workspace: Path,
    champion: registry.ModelVersion,
    doc_ids: pa.ChunkedArray,
) -> Measured:
    """Return the champion's measurements on the documents with these ids, for the gate.

    Raises:
        UserError: The champion's files are gone, or differ from those that were registered.
    """
    scores = _champion_scores(workspace, champion, doc_ids)
    behaviours: tuple[BehaviourScore, ...] = ()
    if tests := recipe.evaluate.behaviour:
        from pipelines.evaluation.behaviour import run_tests  # imports torch

        folder = registry.verified_folder(champion)
        behaviours = run_tests(folder, tests, recipe.evaluate.stride)
    return Measured(champion.model_hash, scores, behaviours)


def _champion_scores(
    workspace: Path, champion: registry.ModelVersion, doc_ids: pa.ChunkedArray
) -> pa.Table:
    """Return the champion's scores of these documents, computed once for all runs."""
    evaluate = EvaluateRecord.read(workspace)
    kept = scores_path(champion.model_hash, evaluate)
    if kept.is_file():
        return pq.read_table(kept)
    from pipelines.evaluation.held_out_documents import each_once
    from pipelines.evaluation.perplexity import score_documents  # imports torch

    preprocess = output_folder(workspace, PreprocessRecord.stage)
    folders = PreprocessRecord.read(workspace).dataset.folders
    files = [
        path
        for folder in folders
        for path in split_files(documents_folder(preprocess / folder), VALIDATION)
    ]
    found = ds.dataset(files).to_table(filter=pc.field("doc_id").isin(doc_ids))
    documents = each_once([found])
    folder = registry.verified_folder(champion)
    _log.info("scoring champion version %d on %d documents", champion.version, len(documents))
    scores = score_documents(folder, documents, evaluate.stride)
    keep_scores(scores, kept)
    return scores


def scores_path(model_hash: str, evaluate: EvaluateRecord) -> Path:
    """Return the path of a model's scores on the documents of an evaluation."""
    name = f"{evaluate.data_hash}-stride-{evaluate.stride:g}.parquet"
    return load_settings().home / SCORES / model_hash / name


def keep_scores(scores: pa.Table, path: Path) -> None:
    """Write the scores, so that a reader finds the complete file or no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    pq.write_table(scores, temporary)
    temporary.replace(path)
