"""One DAG run is one MLflow run: begun once, written to by every stage, ended once.

Points of a curve go out from a thread of their own and never hold up a training step; a server
that is down costs a warning, and the points wait for its return. Everything else (params, tags,
results, artifacts) is written before the call returns, and raises where that fails: the stage then
fails and is retried rather than lose a result.

The data of a run as MLflow's own dataset inputs, by which its pages filter and link runs.
"""

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote, urlparse

from pipelines.core.storage import read_json
from pipelines.run.records import DATA_DOCS, RUN_FILE, DatasetRef
from pipelines.tracking import rest
from pipelines.tracking.curves import Curves, allowed_name, points_now
from pipelines.tracking.mlflow_client import open_client

if TYPE_CHECKING:
    from mlflow import MlflowClient

DAG_RUN_TAG = "penstock.dag_run_id"
MODEL_HASH_TAG = "penstock.model_hash"  # of what it trained; of a version, of what is served
TRAINED_HASH_TAG = "penstock.trained_hash"  # of a version: of what it was made from
DATASET_TAG = "penstock.dataset"  # name@N; of a mixture a@1=3, b@2=7
CACHED_FROM_TAG = "penstock.cached_from"
DATA_DOCS_TAG = "penstock.data_docs"
PARENT_TAG = "mlflow.parentRunId"  # MLflow's own: its pages nest runs by it

_log = logging.getLogger(__name__)
_SYSTEM = "system/"  # by which MLflow's pages find the load of nodes
# What a run used itself, which a run that reuses its training did not.
_OF_ONE_RUN = (_SYSTEM, "seconds/", "worker_hours/", "gpu_hours/", "cost/")
_PARAM_LENGTH = 6000  # MLflow's limit
_CUT = "... (cut; whole in params.yaml)"
_SYSTEM_METRICS_SECONDS = 5.0
_PATIENCE_AFTER_ERROR_S = 3.0


def start_run(
    experiment: str,
    run_name: str,
    tags: Mapping[str, str],
    params: Mapping[str, Any],
) -> str:
    """Begin the MLflow run of a DAG run and return its id.

    Called again with the same `penstock.dag_run_id` tag it returns the run that is there, so a
    task that is retried makes no second one. Nested params are logged under dotted names.
    """
    place = rest.experiment_id(experiment)
    found = rest.oldest_run(f"tags.`{DAG_RUN_TAG}` = '{tags[DAG_RUN_TAG]}'", [place])
    if found is None:
        run_id = rest.create_run(place, run_name, tags)
    else:
        run_id = str(found["info"]["run_id"])
        rest.set_run_status(run_id, rest.RUNNING, None)
    flat = flatten(params)
    rest.log_params(run_id, {allowed_name(key): _cut(str(value)) for key, value in flat.items()})
    return run_id


def end_run(run_id: str, status: str) -> None:
    """Close a run as `FINISHED`, `FAILED` or `KILLED`."""
    rest.set_run_status(run_id, status, int(time.time() * 1000))


def copy_final_metrics(from_run: str, to_run: str) -> None:
    """Repeat in `to_run` the last value of each metric of `from_run`, whose training it reuses."""
    metrics = {each["key"]: each["value"] for each in rest.run(from_run)["data"].get("metrics", [])}
    results = {key: value for key, value in metrics.items() if not key.startswith(_OF_ONE_RUN)}
    rest.log_points(to_run, points_now(results, step=0))
    rest.set_tags(to_run, {CACHED_FROM_TAG: from_run})


def data_docs_address(run_address: str) -> str:
    """Return where MLflow shows the Data Docs of the run with this page."""
    return f"{run_address}/artifacts/{DATA_DOCS}"


def open_run(workspace: Path, curves: Path | None = None) -> "TrackedRun":
    """Return the MLflow run of a workspace; one that logs nothing where `run.json` names none.

    What is in the file `curves` and not yet in MLflow is sent, and new points are kept there.
    """
    path = workspace / RUN_FILE
    facts = read_json(path) if path.is_file() else {}
    return TrackedRun(facts.get("mlflow_run_id"), facts.get("mlflow_artifacts"), curves)


class TrackedRun:
    """Writes to one MLflow run; with `run_id` None it does nothing.

    Use it as a context manager, or call `close`, so that the last points of a curve arrive.
    """

    def __init__(
        self, run_id: str | None, artifacts: str | None = None, curves: Path | None = None
    ) -> None:
        """Nothing is asked yet.

        Args:
            run_id: MLflow's.
            artifacts: Where the run's lie: a path or a URL; asked for where it is not known.
            curves: The file of points on their way.
        """
        self.run_id = run_id
        self._artifacts = artifacts
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
            self._curves.add(
                {allowed_name(key): float(value) for key, value in metrics.items()}, step
            )

    def log_results(self, metrics: Mapping[str, float]) -> None:
        """Write final figures, at step 0."""
        if self.run_id is not None:
            rest.log_points(self.run_id, points_now(metrics, step=0))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Write tags."""
        if self.run_id is not None:
            rest.set_tags(self.run_id, tags)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Copy a file or a whole folder to the run's artifacts, straight to where they are kept."""
        if self.run_id is None:
            return
        if (place := self._local_artifacts()) is not None:
            (place / folder).mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, place / folder, dirs_exist_ok=True)
            else:
                shutil.copy(path, place / folder)
        else:
            upload = self._client().log_artifacts if path.is_dir() else self._client().log_artifact
            upload(self.run_id, str(path), folder or None)

    @contextmanager
    def system_metrics(self, node_id: str) -> Iterator[None]:
        """Record processor, memory, disk, network and GPU use of this node while in the block."""
        if self.run_id is None:
            yield
            return
        prefix, ended = f"{_SYSTEM}{node_id}/", threading.Event()
        thread = threading.Thread(target=self._send_load, args=(prefix, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
        self._begun.set()
        thread.join()  # nobody waits for the last figures of a run that failed

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

    def _local_artifacts(self) -> Path | None:
        """Return where the artifacts lie, if that is a folder."""
        if self._artifacts is None:
            self._artifacts = str(rest.run(str(self.run_id))["info"]["artifact_uri"])
        return local_folder(self._artifacts)

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

    def _send_load(self, prefix: str, ended: threading.Event) -> None:
        """Send this node's load every few seconds; a server that is away costs some points.

        MLflow's own thread would end for good with the first request that fails.
        """
        import httpx

        client = self._client_later()  # which sets MLflow's own variables before its import
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(
            self.run_id,
            sampling_interval=_SYSTEM_METRICS_SECONDS,
            tracking_uri=client.tracking_uri,
        )
        step: int | None = None
        is_last = is_away = False
        while not is_last:
            is_last = ended.wait(monitor.sampling_interval)
            monitor.collect_metrics()
            load = {prefix + name: value for name, value in monitor.aggregate_metrics().items()}
            for each in monitor.monitors:
                each.clear_metrics()
            try:
                step = self._next_step(prefix) if step is None else step + 1
                rest.log_points(str(self.run_id), points_now(load, step))
            except httpx.HTTPError as error:
                if not is_away:
                    _log.warning("no %s metrics for now: %s", prefix, error)
                is_away = True
            else:
                is_away = False

    def _next_step(self, prefix: str) -> int:
        """Return the step after the last one of the curves of this name."""
        metrics = rest.run(str(self.run_id))["data"].get("metrics", [])
        steps = [int(each["step"]) for each in metrics if each["key"].startswith(prefix)]
        return max(steps, default=-1) + 1


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _cut(text: str) -> str:
    if len(text) <= _PARAM_LENGTH:
        return text
    return text[: _PARAM_LENGTH - len(_CUT)] + _CUT


def local_folder(address: str) -> Path | None:
    """Return an address in the artifact store as a folder, if it is one."""
    place = urlparse(address)
    return Path(unquote(place.path)) if place.scheme in ("", "file") else None


_DIGEST_LENGTH = 36  # MLflow's limit


def log_dataset(run_id: str, dataset: DatasetRef, source: str, source_hash: str) -> None:
    """Name both splits as inputs of a run; asked again, MLflow keeps one of each.

    Args:
        run_id: MLflow's.
        dataset: What was trained and evaluated on.
        source: What the data is called where it has no version: a recipe's source.
        source_hash: Its content, likewise.
    """
    splits = {"training": dataset.train, "validation": dataset.validation}
    inputs = []
    for context, split in splits.items():
        place = {"remote": dataset.remote, "git_revision": dataset.git_revision, "split": context}
        profile = {"documents": split.documents, "bytes": split.bytes, "tokens": split.tokens}
        described = {
            "name": f"{dataset.label or source}/{context}",  # name and digest: MLflow's identity
            "digest": (dataset.directory_hash or source_hash)[:_DIGEST_LENGTH],
            "source_type": "dvc" if dataset.label else "penstock",
            "source": json.dumps(place),
            "profile": json.dumps(profile),
        }
        tag = {"key": "mlflow.data.context", "value": context}
        inputs.append({"tags": [tag], "dataset": described})
    rest.log_inputs(run_id, inputs)
