"""The tracking server dies under a run and comes back: nothing is lost, nothing is there twice."""

import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from pipelines.core.machine import free_port
from pipelines.core.storage import write_json
from pipelines.tracking import curves
from pipelines.tracking.mlflow_client import PATIENT, open_client
from pipelines.tracking.tracked_run import TrackedRun, open_run

AWAY_S = 15.0  # more than what a user's command waits
NODE_METRIC = "system/node-0/cpu_utilization_percentage"


class Server:
    """A real one, on a port of its own."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._folder = folder
        self._command = [Path(sys.executable).with_name("mlflow"), "server", "--port", str(port)]
        self._command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
        self._command += ["--no-serve-artifacts", "--default-artifact-root", f"{folder}/artifacts"]
        self.start()

    def start(self) -> None:
        """Until it answers."""
        with (self._folder / "server.log").open("a") as log:
            self.process = psutil.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline
                time.sleep(0.2)
            else:
                return

    def kill(self) -> None:
        """With all that it started."""
        for process in (*self.process.children(recursive=True), self.process):
            process.kill()
        self.process.wait()


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
    server = Server(tmp_path)
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
