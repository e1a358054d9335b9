"""MLflow's REST API, for what can't wait seconds for the import of MLflow's own client."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipelines.tracking.curves import Point
from pipelines.tracking.mlflow_client import call, call_unless_missing, not_sent, pages

_POINTS_A_BATCH = 1000  # MLflow's limits
_PARAMS_A_BATCH = 100
KIND_TAG = "mlflow.experimentKind"  # MLflow's pages show training curves first, not chats
RUNNING = "RUNNING"


def run_status(run_id: str) -> str:
    """`RUNNING`, `FINISHED`, `FAILED` or `KILLED`."""
    return str(run(run_id)["info"]["status"])


def set_run_status(run_id: str, status: str, milliseconds: int | None) -> None:
    """Close a run at a time since 1970, or open it again with `RUNNING` and None."""
    body = {"run_id": run_id, "status": status}
    call("POST", "runs/update", body | ({"end_time": milliseconds} if milliseconds else {}))


def experiment_id(name: str) -> str:
    """Return the id of an experiment, made where missing; two that make it at once both get it."""
    import httpx

    if found := call_unless_missing("experiments/get-by-name", {"experiment_name": name}):
        return str(found["experiment"]["experiment_id"])
    tags = [{"key": KIND_TAG, "value": "custom_model_development"}]
    try:
        made = call("POST", "experiments/create", {"name": name, "tags": tags})
    except httpx.HTTPStatusError:
        found = call_unless_missing("experiments/get-by-name", {"experiment_name": name})
        if found is None:
            raise
        return str(found["experiment"]["experiment_id"])
    return str(made["experiment_id"])


def create_run(experiment: str, name: str, tags: Mapping[str, str]) -> str:
    """Make a run; one request at most is sent, as an answer that was lost may have left one."""
    body = {"experiment_id": experiment, "run_name": name, "start_time": int(time.time() * 1000)}
    pairs = [{"key": key, "value": value} for key, value in tags.items()]
    made = call("POST", "runs/create", body | {"tags": pairs}, not_sent)
    return str(made["run"]["info"]["run_id"])


def run(run_id: str) -> dict[str, Any]:
    """Return a run as the server has it: `info` and `data`."""
    found: dict[str, Any] = call("GET", "runs/get", {"run_id": run_id})["run"]
    return found


def run_if_any(run_id: str) -> dict[str, Any] | None:
    """Likewise; None where there is none."""
    found = call_unless_missing("runs/get", {"run_id": run_id})
    return found and found["run"]


def oldest_run(condition: str, experiments: Sequence[str] = ()) -> dict[str, Any] | None:
    """Return the first run that a search finds, if there is one; without experiments, in all of
    them.
    """
    if not experiments:
        all_of_them = pages("experiments/search", "experiments")
        experiments = [each["experiment_id"] for each in all_of_them]
    query = {"experiment_ids": list(experiments), "filter": condition, "max_results": 1}
    found = call("POST", "runs/search", query | {"order_by": ["attributes.start_time ASC"]})
    runs: list[dict[str, Any]] = found.get("runs", [])
    return runs[0] if runs else None


def log_params(run_id: str, params: Mapping[str, str]) -> None:
    """Write params; one that is there with the same value is no error."""
    pairs = [{"key": key, "value": value} for key, value in params.items()]
    for batch in _batches(pairs, _PARAMS_A_BATCH):
        call("POST", "runs/log-batch", {"run_id": run_id, "params": batch})


def log_param_once(run_id: str, key: str, value: str) -> bool:
    """Write one param; False where it is there with another value, which then stays.

    It is one row under a primary key: of several writers at once, one succeeds.
    """
    import httpx

    try:
        call("POST", "runs/log-parameter", {"run_id": run_id, "key": key, "value": value})
    except httpx.HTTPStatusError:
        params = {each["key"]: each["value"] for each in run(run_id)["data"].get("params", [])}
        if key not in params:  # it failed for another reason
            raise
        return bool(params[key] == value)
    return True


def log_points(run_id: str, points: Sequence[Point]) -> None:
    """Write points; one that is there already, time and all, is not written again."""
    metrics = [
        {"key": each.key, "value": _number(each.value), "step": each.step}
        | {"timestamp": each.milliseconds}
        for each in points
    ]
    for batch in _batches(metrics, _POINTS_A_BATCH):
        call("POST", "runs/log-batch", {"run_id": run_id, "metrics": batch})


def set_tags(run_id: str, tags: Mapping[str, str]) -> None:
    """Write tags."""
    pairs = [{"key": key, "value": value} for key, value in tags.items()]
    call("POST", "runs/log-batch", {"run_id": run_id, "tags": pairs})


def log_inputs(run_id: str, datasets: list[dict[str, Any]]) -> None:
    """Name the datasets that a run used; one that is named already is not named twice."""
    call("POST", "runs/log-inputs", {"run_id": run_id, "datasets": datasets})


def registered_model(name: str) -> dict[str, Any] | None:
    """Return a name in the registry, with its aliases; None where there is none."""
    found = call_unless_missing("registered-models/get", {"name": name})
    return found and found["registered_model"]


def model_versions(name: str) -> list[dict[str, Any]]:
    """Return all versions of a model."""
    return list(pages("model-versions/search", "model_versions", {"filter": f"name = '{name}'"}))


def registered_models() -> list[dict[str, Any]]:
    """Return all names in the registry, in their order, with their aliases and newest versions."""
    query = {"order_by": "name ASC"}
    return list(pages("registered-models/search", "registered_models", query))


def create_registered_model(name: str, tags: Mapping[str, str]) -> bool:
    """Make a name in the registry, tags included; False where it is there."""
    import httpx

    pairs = [{"key": key, "value": value} for key, value in tags.items()]
    try:
        call("POST", "registered-models/create", {"name": name, "tags": pairs})
    except httpx.HTTPStatusError as error:
        if error.response.json().get("error_code") != "RESOURCE_ALREADY_EXISTS":
            raise
        return False
    return True


def set_model_tag(name: str, key: str, value: str) -> None:
    """Tag a name in the registry."""
    call("POST", "registered-models/set-tag", {"name": name, "key": key, "value": value})


def set_alias(name: str, alias: str, version: int) -> None:
    """Let an alias name a version; a reader sees the old one or the new one."""
    import httpx

    body = {"name": name, "alias": alias, "version": str(version)}
    try:
        call("POST", "registered-models/alias", body)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.BAD_REQUEST:
            raise
        # Of several that set a new alias at once one makes its row; now there is one to change.
        call("POST", "registered-models/alias", body)


def delete_alias(name: str, alias: str) -> None:
    """Take an alias away; one that is not there is no error."""
    call("DELETE", "registered-models/alias", {"name": name, "alias": alias})


def artifact_address(name: str, version: int) -> str:
    """Return where the files of a version lie: a path or a URL."""
    query = {"name": name, "version": str(version)}
    return str(call("GET", "model-versions/get-download-uri", query)["artifact_uri"])


def _number(value: float) -> float | str:
    """As Protocol Buffers write it: JSON itself knows no infinity."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _batches(values: list[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    yield from (values[start : start + size] for start in range(0, len(values), size))
