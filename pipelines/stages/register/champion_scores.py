"""Scores of models on held-out documents, computed once for all runs: `scores/` in the home.

A file is named after the model's content and the documents': nobody's scores are ever out of date.
"""

import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from pipelines.core.settings import load_settings
from pipelines.data.documents import documents_folder, split_files
from pipelines.evaluation.gate import Measured
from pipelines.recipe.recipe import Recipe
from pipelines.registry import registry
from pipelines.run.records import VALIDATION, EvaluateRecord, PreprocessRecord, output_folder
from pipelines.run.verdict import BehaviourScore

SCORES = "scores"  # under the home: <model hash>/<documents>.parquet
_log = logging.getLogger(__name__)


def measure_champion(
    recipe: Recipe,
    workspace: Path,
    champion: registry.ModelVersion,
    doc_ids: pa.ChunkedArray,
) -> Measured:
    """What the gate compares a candidate with, of the documents with these ids.

    Raises:
        UserError: the champion's files are gone, or not those that were registered.
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
    """The champion's scores of these documents, computed once for all runs."""
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
    """Where a model's scores of some documents are kept."""
    name = f"{evaluate.data_hash}-stride-{evaluate.stride:g}.parquet"
    return load_settings().home / SCORES / model_hash / name


def keep_scores(scores: pa.Table, path: Path) -> None:
    """Write them; a reader finds all or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    pq.write_table(scores, temporary)
    temporary.replace(path)
