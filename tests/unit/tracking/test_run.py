import math
import os
import signal
import time

import httpx
import pytest

from pipelines.core.storage import write_json
from pipelines.tracking import curves, rest
from pipelines.tracking.mlflow_client import open_client
from pipelines.tracking.tracked_run import copy_final_metrics, end_run, flatten, open_run, start_run
from tests.forked import exit_codes, start

EXPERIMENT = "unit"


@pytest.fixture
def workspace(tmp_path, mlflow_run):
    write_json(tmp_path / "run.json", {"mlflow_run_id": mlflow_run, "dag_run_id": "manual__1"})
    return tmp_path


def test_one_dag_run_makes_one_mlflow_run(mlflow_client):
    tags = {"penstock.dag_run_id": "scheduled__2026-11-01T00:00:00+00:00"}
    params = {"name": "r", "train": {"lr": 0.003}, "prompts": ["x" * 7000]}
    first = start_run(EXPERIMENT, "r", tags, params)
    end_run(first, "FAILED")
    again = start_run(EXPERIMENT, "r", tags, params)
    run = mlflow_client.get_run(first)
    assert again == first
    assert run.info.status == "RUNNING"
    assert run.data.params["train.lr"] == "0.003"
    assert len(run.data.params["prompts"]) == 6000
    assert run.data.params["prompts"].endswith("whole in params.yaml)")
    assert start_run(EXPERIMENT, "r", {"penstock.dag_run_id": "b"}, {}) != first


def test_a_dataset_version_may_be_in_the_name_of_a_param_and_of_a_figure(mlflow_client, tmp_path):
    params = {"mixture": {"web@3": 7.0}}
    run_id = start_run(EXPERIMENT, "m", {"penstock.dag_run_id": "m"}, params)
    write_json(tmp_path / "run.json", {"mlflow_run_id": run_id})
    with open_run(tmp_path) as run:
        run.log_results({"bits_per_byte/web@3": 1.5})
    data = mlflow_client.get_run(run_id).data
    assert data.params == {"mixture.web:3": "7.0"}
    assert data.metrics == {"bits_per_byte/web:3": 1.5}


def test_a_curve_arrives_whole_and_in_order(mlflow_client, workspace, mlflow_run):
    with open_run(workspace) as run:
        for step in range(300):
            run.log_metrics({"loss": 3 - step / 300, "lr": 1e-3}, step)
    history = mlflow_client.get_metric_history(mlflow_run, "loss")
    assert [point.step for point in history] == list(range(300))
    assert len(mlflow_client.get_metric_history(mlflow_run, "lr")) == 300


def test_logging_a_point_does_not_wait_for_the_server(workspace, monkeypatch):
    monkeypatch.setattr(curves, "_PATIENCE_S", 0.1)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = open_run(workspace)
    started = time.perf_counter()
    for step in range(100):
        run.log_metrics({"loss": 1.0}, step)
    assert time.perf_counter() - started < 5  # twice that where each point waited its 0.1 s
    run.close()


def test_points_wait_for_a_server_that_is_down(mlflow_client, workspace, mlflow_run, monkeypatch):
    monkeypatch.setattr(curves, "_RETRY_S", 0.1)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    run = open_run(workspace)
    run.log_metrics({"loss": 2.0}, 1)
    while not run._opened:
        time.sleep(0.01)
    time.sleep(0.3)
    run._opened = mlflow_client  # the server is back
    run.log_metrics({"loss": 1.0}, 2)
    run.close()
    assert [point.value for point in mlflow_client.get_metric_history(mlflow_run, "loss")] == [
        2.0,
        1.0,
    ]


def test_points_that_never_arrive_are_counted_aloud(workspace, monkeypatch, caplog):
    monkeypatch.setattr(curves, "_PATIENCE_S", 0.5)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with open_run(workspace) as run:
        run.log_metrics({"loss": 2.0, "lr": 0.1}, 1)
    assert "2 metric points did not reach MLflow" in caplog.text


def log_and_die(workspace, server_answers):
    """Five steps, which a server that answers soon has, and three that it never gets."""
    run = open_run(workspace, workspace / "curves.jsonl")
    for step in range(1, 6):
        run.log_metrics({"loss": float(step), "lr": 0.1}, step)
    while server_answers and not open_client().get_metric_history(run.run_id, "lr"):
        time.sleep(0.05)
    for step in range(6, 9):
        run.log_metrics({"loss": float(step), "lr": 0.1}, step)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("server", ["answers", "is away"])
def test_what_a_killed_process_did_not_send_is_sent_by_the_next_one(
    mlflow_client, mlflow_uri, workspace, mlflow_run, server
):
    """The last steps are never sent before the end: nothing waits for them."""
    answers = server == "answers"
    variables = {
        "MLFLOW_TRACKING_URI": mlflow_uri if answers else "http://127.0.0.1:9",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }
    dead = start(log_and_die, workspace, answers, **variables)
    assert exit_codes([dead]) == [-signal.SIGKILL]
    if answers:
        assert mlflow_client.get_metric_history(mlflow_run, "loss")
    with (workspace / "curves.jsonl").open("a") as file:
        file.write('{"step": 9, "mill')  # it died as it wrote
    with open_run(workspace, workspace / "curves.jsonl") as run:
        for step in range(7, 11):  # from its checkpoint on, and steps with other values
            run.log_metrics({"loss": float(step) + (step == 7), "lr": 0.1}, step)
    for key in ("loss", "lr"):
        points = mlflow_client.get_metric_history(mlflow_run, key)
        assert [point.step for point in points] == list(range(1, 11))
    assert [point.value for point in mlflow_client.get_metric_history(mlflow_run, "loss")] == [
        float(step) for step in range(1, 11)
    ]


def test_a_request_holds_whole_steps_only():
    steps = [curves.Step(step, 0, {f"m{n}": 0.0 for n in range(300)}) for step in range(7)]
    batches = list(curves._batches(iter(steps)))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert [step for batch in batches for step in batch] == steps


def test_results_tags_and_artifacts_are_there_when_the_call_returns(
    mlflow_client, workspace, mlflow_run
):
    (workspace / "plots").mkdir()
    (workspace / "plots" / "a.txt").write_text("a")
    with open_run(workspace) as run:
        run.log_results({"bits_per_byte": 2.25, "perplexity": math.inf})
        run.set_tags({"penstock.verdict": "refused"})
        run.log_artifact(workspace / "plots", "evaluate")
        run.log_artifact(workspace / "plots" / "a.txt")
        data = mlflow_client.get_run(mlflow_run).data
        assert data.metrics["bits_per_byte"] == 2.25
        assert data.metrics["perplexity"] > 1e300
        assert data.tags["penstock.verdict"] == "refused"
        assert [file.path for file in mlflow_client.list_artifacts(mlflow_run, "evaluate")] == [
            "evaluate/a.txt"
        ]
        assert "a.txt" in [file.path for file in mlflow_client.list_artifacts(mlflow_run)]


def test_what_is_written_later_waits_for_the_first_point_and_is_there_at_the_end(
    mlflow_client, workspace, mlflow_run
):
    with open_run(workspace) as run:
        run.later(lambda: run.set_tags({"penstock.reader": "mmap"}))
        time.sleep(0.3)
        assert "penstock.reader" not in mlflow_client.get_run(mlflow_run).data.tags
        run.log_metrics({"loss": 1.0}, 1)
    assert mlflow_client.get_run(mlflow_run).data.tags["penstock.reader"] == "mmap"


def test_what_could_not_be_written_later_ends_the_block(workspace, mlflow_run):
    def fails() -> None:
        raise OSError("no place left")

    with pytest.raises(OSError, match="no place left"), open_run(workspace) as run:
        run.later(fails)


def test_system_metrics_carry_the_node(mlflow_client, workspace, mlflow_run, monkeypatch):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    with open_run(workspace) as run, run.system_metrics("node-0"):
        run.begin()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if (
                "system/node-0/cpu_utilization_percentage"
                in mlflow_client.get_run(mlflow_run).data.metrics
            ):
                break
            time.sleep(0.1)
    assert (
        "system/node-0/cpu_utilization_percentage" in mlflow_client.get_run(mlflow_run).data.metrics
    )


def test_system_metrics_go_on_after_a_server_that_failed(
    mlflow_client, workspace, mlflow_run, monkeypatch
):
    answers = rest.log_points
    failed = []

    def fails_once(*arguments):
        if not failed:
            failed.append(True)
            raise httpx.ConnectTimeout("away")
        answers(*arguments)

    monkeypatch.setattr(rest, "log_points", fails_once)
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    curve = "system/node-0/cpu_utilization_percentage"
    for known in (0, 1):  # a second life of the run goes on behind the first
        with open_run(workspace) as run, run.system_metrics("node-0"):
            run.begin()
            deadline = time.monotonic() + 20
            while len(mlflow_client.get_metric_history(mlflow_run, curve)) <= known:
                assert time.monotonic() < deadline
                time.sleep(0.1)
    steps = [point.step for point in mlflow_client.get_metric_history(mlflow_run, curve)]
    assert steps == list(range(1, len(steps) + 1))


def test_a_cached_training_repeats_the_figures_of_its_origin(mlflow_client, mlflow_run):
    origin = mlflow_client.create_run(
        mlflow_client.get_run(mlflow_run).info.experiment_id
    ).info.run_id
    mlflow_client.log_metric(origin, "loss", 3.0, step=1)
    mlflow_client.log_metric(origin, "loss", 2.0, step=2)
    mlflow_client.log_metric(origin, "system/node/cpu", 50.0)
    copy_final_metrics(origin, mlflow_run)
    data = mlflow_client.get_run(mlflow_run).data
    assert data.metrics == {"loss": 2.0}
    assert data.tags["penstock.cached_from"] == origin


def test_a_workspace_without_a_run_logs_nothing(tmp_path):
    with open_run(tmp_path) as run, run.system_metrics("node-0"):
        run.log_metrics({"loss": 1.0}, 1)
        run.log_results({"loss": 1.0})
        run.set_tags({"a": "b"})
        run.log_artifact(tmp_path)
    assert run.run_id is None


def test_flatten_names_by_dots():
    assert flatten({"a": {"b": 1, "c": {"d": None}}, "e": [1]}) == {
        "a.b": 1,
        "a.c.d": None,
        "e": [1],
    }
