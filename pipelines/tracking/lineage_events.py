"""OpenLineage events: which run made which data and which model, for a catalogue of the company.

They are sent where OpenLineage's own variables say how (OPENLINEAGE_URL, OPENLINEAGE_CONFIG or
OPENLINEAGE__TRANSPORT__...). A catalogue that is down costs a warning, never a run.

All names are in one namespace. The chain source → dataset/NAME version N → model/NAME version M →
model/NAME@champion is joined by name and by the facet `version`.
"""

import hashlib
import logging
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit
from uuid import NAMESPACE_URL, uuid5

from pipelines.core.product import product_state
from pipelines.recipe.data_section import Source
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.section import registered_label
from pipelines.run.records import ModelRef, RegisterRecord, record_path
from pipelines.run.usage import span
from pipelines.run.workspace import Run, read_recipe

if TYPE_CHECKING:
    from openlineage.client.event_v2 import Dataset, RunEvent

NAMESPACE = os.environ.get("OPENLINEAGE_NAMESPACE", "penstock")
_ON = ("OPENLINEAGE_URL", "OPENLINEAGE_CONFIG")
_TRANSPORT = "OPENLINEAGE__TRANSPORT"
_TRAIN = "train"

State = Literal["COMPLETE", "FAIL"]
_log = logging.getLogger(__name__)


def configured() -> bool:
    """Return whether events are sent anywhere."""
    return any(os.environ.get(name) for name in _ON) or any(
        name.startswith(_TRANSPORT) for name in os.environ
    )


def send(events: Sequence["RunEvent"]) -> None:
    """Send events in order; if the catalogue refuses one, warn and leave out the rest."""
    from openlineage.client import OpenLineageClient

    client = OpenLineageClient()
    try:
        for event in events:
            client.emit(event)
    except Exception as error:  # each transport raises errors of its own
        _log.warning("OpenLineage did not take an event: %s: %s", type(error).__name__, error)
    finally:
        client.close()


def run_events(
    workspace: Path, dag: str, state: State, error: str | None, inputs: dict[str, tuple[str, ...]]
) -> list["RunEvent"]:
    """Return the events of a run that is over: its own, and those of each stage that it had.

    Args:
        workspace: The run's workspace.
        dag: The DAG, whose run is the parent of the stages' runs.
        state: How the run ended.
        error: The line of the error that ended it.
        inputs: The stages in their order, and the stages whose outputs each reads.
    """
    run, recipe = Run.read(workspace), read_recipe(workspace)
    spans = {stage: found for stage in inputs if (found := span(workspace, stage))}
    if not spans:
        return []
    begin, end = min(s for s, _ in spans.values()), max(e for _, e in spans.values())
    events = _pair(dag, run.dag_run_id, None, (begin, end), state, error)
    for stage, (began, ended) in spans.items():
        done = record_path(workspace, stage).is_file()
        events += _pair(
            f"{dag}.{stage}",
            f"{run.dag_run_id}/{stage}",
            (dag, run.dag_run_id),
            (began, ended),
            "COMPLETE" if done else "FAIL",
            None if done else error,
            [each for name in inputs[stage] for each in _output(workspace, recipe, name)]
            + _started_from(workspace, recipe, stage, is_first=not inputs[stage]),
            _output(workspace, recipe, stage) + _registered(workspace, stage) if done else [],
        )
    return events


def publication_events(label: str, workspace: Path, dag: str) -> list["RunEvent"]:
    """Return the events of a dataset version that a run published."""
    run, recipe = Run.read(workspace), read_recipe(workspace)
    now = datetime.now(UTC).timestamp()
    key, parent = f"{run.dag_run_id}/publish", (dag, run.dag_run_id)
    made = [_versioned("dataset", label)]
    inputs = _output(workspace, recipe, "preprocess")
    return _pair(f"{dag}.publish", key, parent, (now, now), "COMPLETE", None, inputs, made)


def promotion_events(model: ModelRef, action: str) -> list["RunEvent"]:
    """Return the events of a version that became champion by a promotion or a rollback."""
    now = datetime.now(UTC).timestamp()
    version = _versioned("model", f"{model.name}@{model.version}")
    alias = _dataset(f"model/{model.name}@champion", str(model.version))
    key = f"{action}/{model.name}/{model.version}/{now}"
    return _pair(
        f"{action}.{model.name}", key, None, (now, now), "COMPLETE", None, [version], [alias]
    )


def _pair(
    job: str,
    key: str,
    parent: tuple[str, str] | None,
    times: tuple[float, float],
    state: State,
    error: str | None,
    inputs: "Sequence[Dataset]" = (),
    outputs: "Sequence[Dataset]" = (),
) -> list["RunEvent"]:
    """Return the event of a run's start, and of its end."""
    from openlineage.client import event_v2 as spec
    from openlineage.client.facet_v2 import error_message_run, parent_run, processing_engine_run

    version = product_state()["version"]
    engine = processing_engine_run.ProcessingEngineRunFacet(version=version, name="penstock")
    facets: dict[str, Any] = {"processing_engine": engine}
    if parent:
        facets["parent"] = parent_run.ParentRunFacet(
            run=parent_run.Run(runId=_id(parent[1])),
            job=parent_run.Job(namespace=NAMESPACE, name=parent[0]),
        )
    ended = dict(facets)
    if error is not None:
        ended["errorMessage"] = error_message_run.ErrorMessageRunFacet(
            message=error, programmingLanguage="PYTHON"
        )
    begin, end = (datetime.fromtimestamp(each, UTC).isoformat() for each in times)
    named = spec.Job(namespace=NAMESPACE, name=job)
    read = [spec.InputDataset(each.namespace, each.name, facets=each.facets) for each in inputs]
    made = [spec.OutputDataset(each.namespace, each.name, facets=each.facets) for each in outputs]
    producer = "https://pypi.org/project/penstock/"
    return [
        spec.RunEvent(
            eventType=kind,
            eventTime=time,
            run=spec.Run(runId=_id(key), facets=each),
            job=named,
            inputs=read,
            outputs=made if kind is not spec.RunState.START else [],
            producer=producer,
        )
        for kind, time, each in (
            (spec.RunState.START, begin, facets),
            (spec.RunState[state], end, ended),
        )
    ]


def _id(key: str) -> str:
    return str(uuid5(NAMESPACE_URL, f"penstock:{key}"))


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
