"""The tracking server dies under a run and comes back: nothing is lost, nothing is there twice."""

import threading
import time
from pathlib import Path

import pytest

from pipelines.core.storage import write_json
from pipelines.tracking import curves
from pipelines.tracking.mlflow_client import PATIENT, open_client
from pipelines.tracking.tracked_run import TrackedRun, open_run
from tests.mlflow_server import MlflowServer

AWAY_S = 15.0  # more than what a user's command waits
NODE_METRIC = "system/node-0/cpu_utilization_percentage"


def log_steps(run: TrackedRun, first: int, last: int) -> None:
    for step in range(first, last + 1):
        run.log_metrics({"train/loss": 1 / step, "train/lr": 0.1}, step)


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_a_run_outlives_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "1")
    monkeypatch.setattr(curves, "_RETRY_S", 0.5)
    for variable, value in PATIENT.items():
        monkeypatch.setenv(variable, value)
    server = MlflowServer(tmp_path, f"{tmp_path}/artifacts")
    try:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        client = open_client()
        run_id = client.create_run("0").info.run_id
        write_json(tmp_path / "run.json", {"mlflow_run_id": run_id})
        with open_run(tmp_path, tmp_path / "curves.jsonl") as run, run.system_metrics("node-0"):
            log_steps(run, 1, 20)
            while not client.get_metric_history(run_id, NODE_METRIC):
                time.sleep(0.2)
            server.kill()
            log_steps(run, 21, 40)  # nobody waits
            assert (tmp_path / "curves.jsonl").read_text().count("\n") == 40
            back = threading.Timer(AWAY_S, server.start)
            back.start()
            run.set_tags({"back": "yes"})  # waits as long as the server is away
            back.join()
            log_steps(run, 41, 50)
            log_steps(run, 41, 45)  # after a rollback
            known = len(client.get_metric_history(run_id, NODE_METRIC))
            while len(client.get_metric_history(run_id, NODE_METRIC)) <= known:
                time.sleep(0.5)
        for curve in ("train/loss", "train/lr"):
            steps = [point.step for point in client.get_metric_history(run_id, curve)]
            assert sorted(steps) == list(range(1, 51))
        assert client.get_run(run_id).data.tags["back"] == "yes"
    finally:
        server.kill()
