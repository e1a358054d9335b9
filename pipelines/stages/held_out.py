"""The documents that a registered version was measured on, to measure its exports on the same."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.core.errors import UserError
from pipelines.data.passes import map_in_process
from pipelines.models.model_folder import read_object
from pipelines.registry.registry import LINEAGE
from pipelines.run.progress import ProgressMeter
from pipelines.run.records import (
    VALIDATION,
    EvaluateRecord,
    PreprocessRecord,
    output_folder,
    record_path,
)
from pipelines.run.workspace import Run, read_recipe, workspace_path

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class HeldOut:
    """Held-out documents, and the registered model's bits per byte on them."""

    documents: "pa.Table"
    bits_per_byte: float
    stride: float  # of the windows in that measurement


def read_held_out(model: Path, runs: Path, workspace: Path | None = None) -> HeldOut:
    """Return the documents on which a registered model's bits per byte were measured.

    Args:
        model: A registered folder, whose lineage names the run and the documents.
        runs: The folder of all workspaces.
        workspace: The workspace of another run on the same data, if the model's own is gone.

    Raises:
        UserError: The lineage doesn't name them, there is no such workspace, or its documents are
            different.
    """
    facts = read_object(model / LINEAGE)
    found, run = facts.get("records", {}).get(EvaluateRecord.stage), facts.get("run")
    if found is None or (run is None and workspace is None):
        raise UserError(
            f"{model / LINEAGE}: it does not say what the model was measured on, so its exports "
            "cannot be measured; only formats without rounding need no measurement"
        )
    record = EvaluateRecord.model_validate(found)
    if workspace is None:
        workspace = workspace_path(runs, Run.model_validate(run).dag_run_id)
    if not record_path(workspace, PreprocessRecord.stage).is_file():
        raise UserError(
            f"{workspace}: the held-out documents of this model's run are gone; give --workspace "
            "of another run on the same data, which `penstock run` restores from the cache"
        )
    documents = _documents(workspace)
    ids = "\n".join(documents["doc_id"].to_pylist())
    if hashlib.sha256(ids.encode()).hexdigest() != record.data_hash:
        raise UserError(
            f"{workspace}: the model was not measured on this workspace's held-out documents"
        )
    return HeldOut(documents, record.bits_per_byte, record.stride)


def score_export(folder: Path, held_out: HeldOut, progress: ProgressMeter) -> float:
    """Return the bits per byte of an exported folder, which is loaded as a server loads it."""
    from pipelines.evaluation.bootstrap import bits_per_byte
    from pipelines.stages.evaluate.scoring import Scoring

    scoring = Scoring(held_out.documents, {}, held_out.stride, progress)
    (scores,) = scoring.folders(map_in_process, [folder])
    return bits_per_byte(scores)


def _documents(workspace: Path) -> "pa.Table":
    from pipelines.evaluation.held_out_documents import each_once, read_shares, without_bad_answers

    dataset = PreprocessRecord.read(workspace).dataset
    shares = dataset.shares(read_recipe(workspace).evaluate.max_bytes)
    held_out = read_shares(output_folder(workspace, PreprocessRecord.stage), VALIDATION, shares)
    return without_bad_answers(each_once(held_out.values()))
