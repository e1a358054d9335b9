"""MLflow is asked beforehand for what a run's end needs: a real server, and stores of each kind."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pipelines.core.errors import UnreachableError, UserError
from pipelines.core.writable_place import PROBE
from pipelines.registry.registry_probe import check_mlflow
from tests.s3_server import s3_bucket


class Gateway(BaseHTTPRequestHandler):
    """Lets nobody write."""

    def do_POST(self):
        self.send_response(self.server.status)
        self.end_headers()

    def do_GET(self):
        self.send_response(404 if "get-by-name" in self.path else 403)
        self.end_headers()

    def log_message(self, *_):
        pass


@contextmanager
def gateway(status, monkeypatch):
    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        server.status = status
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "kind", "told"),
    [
        (403, UserError, "answers 403: .*; fix MLFLOW_TRACKING_USERNAME"),
        (503, UnreachableError, "answers 503: .*; see its log"),
    ],
)
def test_a_server_that_registers_nothing_is_one_line(home, monkeypatch, status, kind, told):
    with gateway(status, monkeypatch), pytest.raises(UserError, match=told) as refused:
        check_mlflow("new")
    assert type(refused.value) is kind


def test_where_nobody_tells_the_place_of_artifacts_nothing_is_refused(home, monkeypatch):
    with gateway(400, monkeypatch):
        check_mlflow("new")


def test_artifacts_in_a_bucket_are_written_there(name, mlflow_client):
    with s3_bucket(name) as bucket:
        mlflow_client.create_experiment(name, artifact_location=f"s3://{name}/mlflow")
        check_mlflow(name)
        assert [each.key for each in bucket.objects.all()] == [f"mlflow/{PROBE}"]
        mlflow_client.create_experiment(f"{name}-lost", artifact_location="s3://no-bucket/mlflow")
        with pytest.raises(UserError, match="MLflow's artifact store: s3://no-bucket/mlflow can't"):
            check_mlflow(f"{name}-lost")


def test_artifacts_that_mlflow_itself_writes_go_through_it(
    name, mlflow_client, tmp_path, monkeypatch
):
    mlflow_client.create_experiment(name, artifact_location=f"mlflow-artifacts:/{name}")
    with pytest.raises(UnreachableError, match="MLflow's artifact store: mlflow-artifacts:/"):
        check_mlflow(name)
    monkeypatch.setenv("_MLFLOW_SERVER_SERVE_ARTIFACTS", "true")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_DESTINATION", str(tmp_path / "destination"))
    check_mlflow(name)
    assert (tmp_path / "destination" / name / PROBE).is_file()
