"""OpenLineage: what a stage read and made and who became champion, for a catalogue of the company.

Airflow's provider for OpenLineage sends the events of tasks, and asks a stage's task for the data
and the models. A promotion may happen outside of a task, so its events are sent here, where
OpenLineage's own variables say how (OPENLINEAGE_URL, OPENLINEAGE_CONFIG or
OPENLINEAGE__TRANSPORT__...). A catalogue that is down costs a warning, never a run.

All names are in one namespace. The chain source → dataset/NAME version N → model/NAME version M →
model/NAME@champion is joined by name and by the facet `version`.
"""

import hashlib
import logging
import os
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pipelines.core.product import product_state
from pipelines.recipe.data_section import Source
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.section import registered_label
from pipelines.run.records import ModelRef, RegisterRecord, record_path
from pipelines.run.workspace import read_recipe

if TYPE_CHECKING:
    from openlineage.client.event_v2 import Dataset, RunEvent

# OpenLineage's names for a parent, as NAMESPACE/JOB/RUN, and for the parent of all.
PARENT, ROOT = "OPENLINEAGE_PARENT_ID", "OPENLINEAGE_ROOT_PARENT_ID"
NAMESPACE = os.environ.get("OPENLINEAGE_NAMESPACE", "penstock")
_ON = ("OPENLINEAGE_URL", "OPENLINEAGE_CONFIG")
_TRANSPORT = "OPENLINEAGE__TRANSPORT"
_TRAIN = "train"

_log = logging.getLogger(__name__)


def configured() -> bool:
    """Return whether events are sent anywhere."""
    return any(os.environ.get(name) for name in _ON) or any(
        name.startswith(_TRANSPORT) for name in os.environ
    )


def announce(model: ModelRef, action: str) -> None:
    """Send the events of a version that became champion by a promotion or a rollback.

    If there is no catalogue, nothing is sent; if it refuses an event, that is a warning.
    """
    if not configured():
        return
    from openlineage.client import OpenLineageClient

    try:
        with closing(OpenLineageClient()) as client:
            for event in _promotion_events(model, action):
                client.emit(event)
    except Exception as error:  # each transport raises errors of its own
        _log.warning("OpenLineage did not take an event: %s: %s", type(error).__name__, error)


def stage_inputs(workspace: Path, stage: str, earlier: Sequence[str]) -> list["Dataset"]:
    """Return what a stage reads: the outputs of earlier stages, and what is from outside the run.

    Args:
        workspace: The run's workspace.
        stage: The stage's name.
        earlier: The stages whose outputs it reads.
    """
    recipe = read_recipe(workspace)
    found = [each for name in earlier for each in _output(workspace, recipe, name)]
    return found + _started_from(workspace, recipe, stage, is_first=not earlier)


def stage_outputs(workspace: Path, stage: str) -> list["Dataset"]:
    """Return what a finished stage made: its output, and the version that *register* added."""
    return _output(workspace, read_recipe(workspace), stage) + _registered(workspace, stage)


def published(label: str) -> "Dataset":
    """Return a dataset version, `name@N`."""
    return _versioned("dataset", label)


def _promotion_events(model: ModelRef, action: str) -> list["RunEvent"]:
    from openlineage.client import event_v2 as spec
    from openlineage.client.uuid import generate_new_uuid

    version = _versioned("model", f"{model.name}@{model.version}")
    alias = _dataset(f"model/{model.name}@champion", str(model.version))
    now = datetime.now(UTC).isoformat()
    run = spec.Run(runId=str(generate_new_uuid()), facets=_run_facets())
    return [
        spec.RunEvent(
            eventType=state,
            eventTime=now,
            run=run,
            job=spec.Job(namespace=NAMESPACE, name=f"{action}.{model.name}"),
            inputs=[spec.InputDataset(version.namespace, version.name, facets=version.facets)],
            outputs=[spec.OutputDataset(alias.namespace, alias.name, facets=alias.facets)],
            producer="https://pypi.org/project/penstock/",
        )
        for state in (spec.RunState.START, spec.RunState.COMPLETE)
    ]


def _run_facets() -> dict[str, Any]:
    """Return the facets of a promotion's run: Penstock's version and, in a task, its parents."""
    from openlineage.client.facet_v2 import parent_run, processing_engine_run

    version = product_state()["version"]
    engine = processing_engine_run.ProcessingEngineRunFacet(version=version, name="penstock")
    facets: dict[str, Any] = {"processing_engine": engine}
    if parent := os.environ.get(PARENT):
        space, name, run = parent.rsplit("/", 2)
        root_space, root_name, root_run = os.environ.get(ROOT, parent).rsplit("/", 2)
        facets["parent"] = parent_run.ParentRunFacet(
            run=parent_run.Run(runId=run),
            job=parent_run.Job(namespace=space, name=name),
            root=parent_run.Root(
                run=parent_run.RootRun(runId=root_run),
                job=parent_run.RootJob(namespace=root_space, name=root_name),
            ),
        )
    return facets


def _dataset(name: str, version: str, namespace: str = NAMESPACE) -> "Dataset":
    from openlineage.client.event_v2 import Dataset
    from openlineage.client.facet_v2 import dataset_version_dataset

    facet = dataset_version_dataset.DatasetVersionDatasetFacet(datasetVersion=version)
    return Dataset(namespace, name, facets={"version": facet})


def _versioned(kind: str, label: str) -> "Dataset":
    name, _, version = label.partition("@")
    return _dataset(f"{kind}/{name}", version)


def _output(workspace: Path, recipe: Recipe, stage: str) -> list["Dataset"]:
    """Return what a stage made, whose version is the hash of its record."""
    record = record_path(workspace, stage)
    if not record.is_file():
        return []
    return [_dataset(f"{recipe.name}/{stage}", hashlib.md5(record.read_bytes()).hexdigest())]  # noqa: S324


def _started_from(
    workspace: Path, recipe: Recipe, stage: str, *, is_first: bool
) -> list["Dataset"]:
    """Return what a stage reads from outside the run: the source, or a registered model."""
    if is_first:
        return _source(workspace, recipe.data.source)
    starts = (recipe.model.init_from, recipe.adapter.init_from) if stage == _TRAIN else ()
    labels = {label for each in starts if (label := registered_label(each))}
    return [_versioned("model", label) for label in sorted(labels)]


def _source(workspace: Path, source: Source) -> list["Dataset"]:
    if source.kind == "mixture":
        return [_versioned("dataset", label) for label in source.mixture]
    if source.kind == "dataset":
        return [_versioned("dataset", str(source.path))]
    version = hashlib.sha256((workspace / "source.json").read_bytes()).hexdigest()
    if source.kind == "stdlib":
        return [_dataset("source/python-standard-library", version)]
    if source.extension is not None:
        return [_dataset(f"source/{source.extension.name}", version)]
    if source.kind == "huggingface":
        return [_dataset(f"datasets/{source.path}", version, "https://huggingface.co")]
    found = urlsplit(str(source.path))
    if found.scheme and found.scheme != "file":
        return [_dataset(found.path.strip("/"), version, f"{found.scheme}://{found.netloc}")]
    return [_dataset(found.path, version, "file")]


def _registered(workspace: Path, stage: str) -> list["Dataset"]:
    """Return the version that the stage register added, promoted or not."""
    if stage != RegisterRecord.stage:
        return []
    record = RegisterRecord.read(workspace)
    added = record.model if record.verdict.decision == "promoted" else record.candidate
    return [_versioned("model", f"{added.name}@{added.version}")] if added else []
