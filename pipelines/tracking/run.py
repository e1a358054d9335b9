"""One DAG run is one MLflow run: begun once, written to by every stage, ended once.

Points of a curve go out from a thread of their own and never hold up a training step; a server
that is down costs a warning, and the points wait for its return. Everything else (params, tags,
results, artifacts) is written before the call returns, and raises where that fails: the stage then
fails and is retried rather than lose a result.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pipelines.core.records import DATA_DOCS, RUN_FILE
from pipelines.core.settings import Settings
from pipelines.core.storage import read_json
from pipelines.tracking.client import open_client
from pipelines.tracking.curves import Curves

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

DAG_RUN_TAG = "penstock.dag_run_id"
DATASET_TAG = "penstock.dataset"  # name@N; of a mixture a@1=3, b@2=7
CACHED_FROM_TAG = "penstock.cached_from"
DATA_DOCS_TAG = "penstock.data_docs"
PARENT_TAG = "mlflow.parentRunId"  # MLflow's own: its pages nest runs by it
KIND_TAG = "mlflow.experimentKind"  # MLflow's pages show training curves first, not chats

_log = logging.getLogger(__name__)
# What a run used itself, which a run that reuses its training did not.
_OF_ONE_RUN = ("system/", "seconds/", "worker_hours/", "gpu_hours/", "cost/")
_METRICS_A_BATCH = 1000  # MLflow's limits
_PARAMS_A_BATCH = 100
_PARAM_LENGTH = 6000
_CUT = "... (cut; whole in params.yaml)"
_SYSTEM_METRICS_SECONDS = 5
_PATIENCE_AFTER_ERROR_S = 3.0


def start_run(
    settings: Settings,
    experiment: str,
    run_name: str,
    tags: Mapping[str, str],
    params: Mapping[str, Any],
) -> str:
    """Begin the MLflow run of a DAG run and return its id.

    Called again with the same `penstock.dag_run_id` tag it returns the run that is there, so a
    task that is retried makes no second one. Nested params are logged under dotted names.
    """
    client = open_client(settings.mlflow_url)
    place = experiment_id(client, experiment)
    run_id = _existing_run(client, place, tags.get(DAG_RUN_TAG))
    if run_id is None:
        run_id = client.create_run(place, run_name=run_name, tags=dict(tags)).info.run_id
    else:
        client.update_run(run_id, status="RUNNING")
    _log_params(client, run_id, params)
    return run_id


def end_run(run_id: str, status: str) -> None:
    """Close a run as `FINISHED`, `FAILED` or `KILLED`."""
    open_client().set_terminated(run_id, status)


def copy_final_metrics(from_run: str, to_run: str) -> None:
    """Repeat in `to_run` the last value of each metric of `from_run`, whose training it reuses."""
    client = open_client()
    metrics = client.get_run(from_run).data.metrics
    results = {key: value for key, value in metrics.items() if not key.startswith(_OF_ONE_RUN)}
    _send(client, to_run, _points(results, step=0))
    client.set_tag(to_run, CACHED_FROM_TAG, from_run)


def data_docs_address(run_address: str) -> str:
    """Where MLflow shows the Data Docs of the run with this page."""
    return f"{run_address}/artifacts/{DATA_DOCS}"


def open_run(workspace: Path, curves: Path | None = None) -> "TrackedRun":
    """The MLflow run of a workspace; one that logs nothing where `run.json` names none.

    What is in the file `curves` and not yet in MLflow is sent, and new points are kept there.
    """
    path = workspace / RUN_FILE
    facts = read_json(path) if path.is_file() else {}
    return TrackedRun(facts.get("mlflow_run_id"), curves)


@dataclass(frozen=True)
class Point:
    """One value of one metric."""

    key: str
    value: float
    milliseconds: int  # since 1970
    step: int


class TrackedRun:
    """Writes to one MLflow run; with `run_id` None it does nothing.

    Use it as a context manager, or call `close`, so that the last points of a curve arrive.
    """

    def __init__(self, run_id: str | None, curves: Path | None = None) -> None:
        self.run_id = run_id
        self._opened: MlflowClient | None = None
        self._begun = threading.Event()
        self._later: list[Future[None]] = []
        self._curves = Curves(run_id, self._client_later, curves) if run_id else None

    def begin(self) -> None:
        """Training goes on: what is done beside it may start.

        Before that, MLflow's import would keep the first step waiting for seconds.
        """
        self._begun.set()

    def later(self, write: Callable[[], None]) -> None:
        """Write in a thread, not before `begin`; `close` waits for it and raises its error."""
        if self.run_id is None:
            return
        done: Future[None] = Future()
        self._later.append(done)
        threading.Thread(target=self._write_later, args=(write, done), daemon=True).start()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a point to each curve, unless that step is there; returns at once."""
        self.begin()
        if self._curves is not None:
            self._curves.add({_name(key): float(value) for key, value in metrics.items()}, step)

    def log_results(self, metrics: Mapping[str, float]) -> None:
        """Write final figures, at step 0."""
        if self.run_id is not None:
            _send(self._client(), self.run_id, _points(metrics, step=0))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Write tags."""
        if self.run_id is not None:
            for key, value in tags.items():
                self._client().set_tag(self.run_id, key, value)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Copy a file or a whole folder to the run's artifacts, straight to where they are kept."""
        if self.run_id is None:
            return
        upload = self._client().log_artifacts if path.is_dir() else self._client().log_artifact
        upload(self.run_id, str(path), folder or None)

    @contextmanager
    def system_metrics(self, node_id: str) -> Iterator[None]:
        """Record processor, memory, disk, network and GPU use of this node while in the block."""
        if self.run_id is None:
            yield
            return
        started: Future[SystemMetricsMonitor] = Future()
        threading.Thread(target=self._start_monitor, args=(node_id, started), daemon=True).start()
        ending = threading.Thread(target=_finish, args=(node_id, started), daemon=True)
        try:
            yield
        except BaseException:
            ending.start()  # nobody waits for the last figures of a run that failed
            raise
        self._begun.set()
        ending.start()
        ending.join()

    def close(self) -> None:
        """Wait until all is written; warns of points of curves that could not be."""
        self._begun.set()
        if self._curves is not None:
            self._curves.close()
        for each in self._later:
            each.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif self._curves is not None:  # what is left is sent by who goes on
            self._begun.set()
            self._curves.close(_PATIENCE_AFTER_ERROR_S)

    def _client(self) -> "MlflowClient":
        if self._opened is None:
            self._opened = open_client()
        return self._opened

    def _client_later(self) -> "MlflowClient":
        self._begun.wait()
        return self._client()

    def _write_later(self, write: Callable[[], None], done: "Future[None]") -> None:
        self._begun.wait()
        try:
            write()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def _start_monitor(self, node_id: str, started: "Future[SystemMetricsMonitor]") -> None:
        try:
            client = self._client_later()
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            monitor = SystemMetricsMonitor(
                self.run_id,
                sampling_interval=_SYSTEM_METRICS_SECONDS,
                resume_logging=True,
                node_id=node_id,
                tracking_uri=client.tracking_uri,
            )
            monitor.start()
        except Exception as error:
            started.set_exception(error)
        else:
            started.set_result(monitor)


def _finish(node_id: str, started: "Future[SystemMetricsMonitor]") -> None:
    if (error := started.exception()) is None:
        started.result().finish()
    else:
        _log.warning("no system metrics of %s: %s", node_id, error)


def experiment_id(client: "MlflowClient", name: str) -> str:
    """The id of an experiment, made where missing; two that make it at once both get it."""
    from mlflow.exceptions import MlflowException

    if found := client.get_experiment_by_name(name):
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(name, tags={KIND_TAG: "custom_model_development"}))
    except MlflowException:
        if found := client.get_experiment_by_name(name):
            return str(found.experiment_id)
        raise


def _existing_run(client: "MlflowClient", experiment: str, dag_run: str | None) -> str | None:
    if dag_run is None:
        return None
    runs = client.search_runs([experiment], f"tags.`{DAG_RUN_TAG}` = '{dag_run}'", max_results=1)
    return runs[0].info.run_id if runs else None


def _points(metrics: Mapping[str, float], step: int) -> list[Point]:
    now = int(time.time() * 1000)
    return [Point(_name(key), float(value), now, step) for key, value in metrics.items()]


def _send(client: "MlflowClient", run_id: str, points: list[Point]) -> None:
    from mlflow.entities import Metric

    metrics = [Metric(p.key, p.value, p.milliseconds, p.step) for p in points]
    for start in range(0, len(metrics), _METRICS_A_BATCH):
        client.log_batch(run_id, metrics=metrics[start : start + _METRICS_A_BATCH])


def _log_params(client: "MlflowClient", run_id: str, params: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    flat = [Param(_name(key), _cut(str(value))) for key, value in flatten(params).items()]
    for start in range(0, len(flat), _PARAMS_A_BATCH):
        client.log_batch(run_id, params=flat[start : start + _PARAMS_A_BATCH])


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _name(key: str) -> str:
    """A dataset version in it as `name:N`: MLflow allows no `@` in a metric's or param's name."""
    return key.replace("@", ":")


def _cut(text: str) -> str:
    if len(text) <= _PARAM_LENGTH:
        return text
    return text[: _PARAM_LENGTH - len(_CUT)] + _CUT
