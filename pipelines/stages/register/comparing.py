"""Compares the candidate with the champion: scores of both, and the data of the compare page.

Scores on held-out documents are computed once for all runs and lie in `scores/` of the home folder.
A file's name holds the hashes of the model and the documents, so scores are never out of date.
"""

import hashlib
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

from pipelines.core.checked_json import read_model
from pipelines.core.settings import load_settings
from pipelines.core.storage import folder_hash, read_json, write_json, write_text
from pipelines.data.documents import documents_folder, split_files
from pipelines.evaluation.comparison_charts import Side
from pipelines.evaluation.comparison_page import compare_page
from pipelines.evaluation.exact_match import Question, answer_questions
from pipelines.evaluation.gate import Measured
from pipelines.evaluation.judge import Pair, judge
from pipelines.evaluation.loss_curve import CURVE, parse_curve
from pipelines.evaluation.task_scores import TaskRow, of_answers, task_table
from pipelines.recipe.recipe import PAIR_TASKS, QUESTIONS, Recipe
from pipelines.registry import registry
from pipelines.run.records import (
    PAIRS_FILE,
    VALIDATION,
    EvaluateRecord,
    PreprocessRecord,
    output_folder,
)
from pipelines.run.verdict import BehaviourScore, Judgement, Probes, Verdict
from pipelines.stage_cache.used_extensions import extension_fingerprints
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
    curve = read_run_artifact(version.run_id, _CURVE) if version.run_id else None
    facts = _facts(version)
    side = Side(
        name=version.label,
        facts=facts,
        curve=_parsed(parse_curve, curve, f"{_CURVE} of {version.label}'s run"),
        training=training_elsewhere(facts),
    )
    found = side.fact("records", "evaluate", "probes")
    probes = _parsed(Probes.model_validate, found, f"the probes of {version.label}")
    return replace(side, probes=probes or Probes())


def _facts(version: registry.ModelVersion) -> Mapping[str, Any]:
    """Return a registered model's lineage; empty if it is missing or broken."""
    address = rest.artifact_address(version.name, version.version)
    lineage = read_artifact(address, registry.LINEAGE)
    return _parsed(json.loads, lineage, f"{registry.LINEAGE} of {version.label}") or {}


def _parsed(parse: Callable[[S], T], found: S | None, what: str) -> T | None:
    """Return the parsed value; None if it is missing or broken, which must not stop a candidate."""
    if found is None:
        return None
    try:
        return parse(found)
    except (ValueError, KeyError) as error:
        _log.warning("%s can't be read, so the page doesn't show it: %s", what, error)
        return None


def judge_samples(
    recipe: Recipe, facts: Mapping[str, Any], champion: registry.ModelVersion
) -> Judgement | None:
    """Return the judgement on what both models wrote for the same prompts, if the recipe asks.

    It is asked once for the same texts: a run that tries again, or waits for a user, keeps it.

    Args:
        recipe: The run's recipe.
        facts: The candidate's lineage.
        champion: The version that the candidate was compared with.
    """
    by = recipe.registration.judge
    if by is None:
        return None
    theirs = Side(name=champion.label, facts=_facts(champion)).samples
    ours = Side(name="candidate", facts=facts).samples
    pairs = [Pair(each, text, theirs[each]) for each, text in ours.items() if each in theirs]
    if not pairs:
        why = "no text of the champion is kept for a prompt of evaluate.prompts"
        return Judgement(judge=by.model, pairs=0, failure=why)
    content = json.dumps([by.model_dump(), pairs]).encode()
    name = f"judge-{hashlib.sha256(content).hexdigest()}.json"
    settings = load_settings()
    kept = settings.home / SCORES / champion.model_hash / name
    if kept.is_file():
        return read_model(kept, Judgement)
    key = settings.secrets / JUDGE_KEY
    found = judge(pairs, by, key.read_text().strip() if key.is_file() else None)
    _log.info("%s", found)
    if not found.failure:
        write_json(kept, found.model_dump())
    return found


JUDGE_KEY = "judge-key"  # among the secrets, if the judge's address asks for one
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
    tasks = (
        _champion_tasks(recipe, workspace, champion) if recipe.registration.asked_tasks else None
    )
    return Measured(champion.model_hash, scores, behaviours, tasks)


def _champion_tasks(recipe: Recipe, workspace: Path, champion: registry.ModelVersion) -> pa.Table:
    """Return the champion's results on the limited tasks, computed once for all runs."""
    kept = tasks_path(champion.model_hash, recipe, workspace)
    if kept.is_file():
        return pq.read_table(kept)
    from pipelines.evaluation.harness import run_harness

    folder = registry.verified_folder(champion)
    _log.info("putting champion version %d to tasks", champion.version)
    limits = [limit.task for limit in recipe.registration.asked_tasks]
    rows: list[TaskRow] = []
    if QUESTIONS in limits:
        asked, questions = recipe.evaluate.questions, _questions(workspace)
        rows += of_answers(answer_questions(folder, questions, asked.pattern, asked.max_tokens))
    if set(PAIR_TASKS) & set(limits):
        rows += _champion_pairs(recipe, workspace, folder)
    if set(limits) - {QUESTIONS, *PAIR_TASKS}:
        chat = recipe.data.instruction.is_chat
        rows += run_harness(folder, recipe.evaluate.harness, chat=chat).rows
    found = task_table(rows)
    keep_scores(found, kept)
    return found


def _champion_pairs(recipe: Recipe, workspace: Path, folder: Path) -> list[TaskRow]:
    """Return the champion's results on the candidate's pairs, with the candidate's reference."""
    from pipelines.evaluation.preferences import pair_rows, score_pairs  # imports torch

    ours = _pairs(workspace)
    documents = _documents(workspace, ours["doc_id"])
    scores = score_pairs(folder, documents, EvaluateRecord.read(workspace).stride)
    for name in scores.column_names:
        if name.endswith("_reference_nats"):
            scores = scores.set_column(scores.schema.get_field_index(name), name, ours[name])
    return pair_rows(scores, recipe.preference)


def _pairs(workspace: Path) -> pa.Table:
    return pq.read_table(output_folder(workspace, EvaluateRecord.stage) / PAIRS_FILE)


def _questions(workspace: Path) -> list[Question]:
    answers = read_json(output_folder(workspace, EvaluateRecord.stage) / "answers.json")
    return [Question(each["question"], each["wanted"]) for each in answers]


def tasks_path(model_hash: str, recipe: Recipe, workspace: Path) -> Path:
    """Return the path of a model's results on the limited tasks of a recipe, named by content."""
    asked, harness = recipe.evaluate.questions, recipe.evaluate.harness
    limits = [limit.task for limit in recipe.registration.asked_tasks]
    asks_pairs = set(PAIR_TASKS) & set(limits)
    known = ("doc_id", "chosen_reference_nats", "rejected_reference_nats")
    content = [
        limits,
        [_pairs(workspace).select(known).to_pydict(), recipe.preference.model_dump()]
        if asks_pairs
        else None,
        _questions(workspace),
        [folder_hash(Path(file).parent) for file in harness.files],
        [asked.model_dump(), harness.model_dump(), recipe.data.instruction.is_chat],
        extension_fingerprints(recipe),
    ]
    name = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return load_settings().home / SCORES / model_hash / f"tasks-{name}.parquet"


def _champion_scores(
    workspace: Path, champion: registry.ModelVersion, doc_ids: pa.ChunkedArray
) -> pa.Table:
    """Return the champion's scores of these documents, computed once for all runs."""
    evaluate = EvaluateRecord.read(workspace)
    kept = scores_path(champion.model_hash, evaluate)
    if kept.is_file():
        return pq.read_table(kept)
    from pipelines.evaluation.perplexity import score_documents  # imports torch

    documents = _documents(workspace, doc_ids)
    folder = registry.verified_folder(champion)
    _log.info("scoring champion version %d on %d documents", champion.version, len(documents))
    scores = score_documents(folder, documents, evaluate.stride)
    keep_scores(scores, kept)
    return scores


def _documents(workspace: Path, doc_ids: pa.ChunkedArray) -> pa.Table:
    """Return the held-out documents with these ids, in their order."""
    from pipelines.evaluation.held_out_documents import each_once

    preprocess = output_folder(workspace, PreprocessRecord.stage)
    folders = PreprocessRecord.read(workspace).dataset.folders
    files = [
        path
        for folder in folders
        for path in split_files(documents_folder(preprocess / folder), VALIDATION)
    ]
    return each_once([ds.dataset(files).to_table(filter=pc.field("doc_id").isin(doc_ids))])


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
