"""Airflow, Ray and MLflow: their answers, and who should have answered."""

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from pipelines.core.machine import free_port
from pipelines.core.settings import PORTS_FILE
from pipelines.doctor import services
from pipelines.doctor.findings import FaultError, NotHereError
from tests.unit.doctor.recordings import told

BEAT = "2026-11-22T08:30:00+00:00"
HEALTHY = {
    "metadatabase": {"status": "healthy"},
    "scheduler": {"status": "healthy", "latest_scheduler_heartbeat": BEAT},
    "triggerer": {"status": "healthy", "latest_triggerer_heartbeat": BEAT},
    "dag_processor": {"status": "healthy", "latest_dag_processor_heartbeat": BEAT},
}


@pytest.fixture(autouse=True)
def nothing_is_up(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    for variable in ("PENSTOCK_AIRFLOW_URL", "MLFLOW_TRACKING_URI", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)
    for part in ("AIRFLOW", "MLFLOW", "RAY"):
        monkeypatch.setenv(f"PENSTOCK_{part}_PORT", str(free_port()))


@contextmanager
def server(answers: dict[str, object], status: int = 200):
    """A server with fixed answers by path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            found = answers.get(self.path.partition("?")[0])
            self.send_response(404 if found is None else status)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, *_):
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_a_healthy_airflow_has_no_fault():
    assert told(services.assess_airflow(HEALTHY)) == []


@pytest.mark.parametrize(
    ("part", "value", "saw"),
    [
        ("metadatabase", {"status": "unhealthy"}, "Airflow's metadatabase is unhealthy"),
        (
            "scheduler",
            {"status": "unhealthy", "latest_scheduler_heartbeat": BEAT},
            f"Airflow's scheduler is unhealthy, last heard of at {BEAT}",
        ),
        (
            "triggerer",
            {"status": None, "latest_triggerer_heartbeat": None},
            "Airflow's triggerer is not running",
        ),
        ("dag_processor", None, "Airflow's dag-processor is not running"),
    ],
)
def test_a_part_of_airflow_that_is_away_is_told(part, value, saw):
    assert told(services.assess_airflow(HEALTHY | {part: value})) == [("problem", saw)]


@pytest.mark.parametrize("look", [services.airflow, services.ray, services.mlflow])
def test_what_nobody_started_is_not_here(look):
    with pytest.raises(NotHereError, match="penstock up"):
        list(look())


@pytest.mark.parametrize("look", [services.airflow, services.ray, services.mlflow])
def test_what_was_started_and_is_away_is_a_fault(look, tmp_path):
    (tmp_path / PORTS_FILE).write_text("{}")
    with pytest.raises(FaultError, match="does not answer at http"):
        list(look())


def test_what_was_named_and_is_away_is_a_fault(monkeypatch):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(FaultError, match="Ray does not answer"):
        list(services.ray())


def test_a_token_that_is_refused_is_told(monkeypatch):
    with server({"/api/version": {}}, status=401) as url:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", url)
        with pytest.raises(FaultError, match="Ray answers 401") as error:
            list(services.ray())
    assert "token" in error.value.fix


@pytest.mark.parametrize("answer", [[], "words"])
@pytest.mark.parametrize(
    ("look", "variable", "path"),
    [
        (services.airflow, "PENSTOCK_AIRFLOW_URL", "/api/v2/monitor/health"),
        (services.ray, "RAY_API_SERVER_ADDRESS", "/api/version"),
        (services.mlflow, "MLFLOW_TRACKING_URI", "/version"),
    ],
)
def test_another_program_in_its_place_is_told(monkeypatch, look, variable, path, answer):
    search = {"/api/2.0/mlflow/experiments/search": {}}
    with server({path: answer} | search) as url:
        monkeypatch.setenv(variable, url)
        with pytest.raises(FaultError, match=r"what answers at http.* is not") as error:
            list(look())
    assert variable in error.value.fix


@pytest.mark.parametrize("answer", [None, [], {}, {"data": {"result": {}}}, {"data": []}])
def test_nodes_that_can_not_be_counted_are_none(monkeypatch, answer):
    with server({"/api/v0/nodes": answer}) as url:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", url)
        assert services.ray_nodes() == 0
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://[bad")
    assert services.ray_nodes() == 0


@pytest.mark.parametrize(
    ("there", "here", "state"),
    [("2.60.0", "2.60.0", "ok"), ("2.60.0", None, "ok"), ("2.59.1", "2.60.0", "problem")],
)
def test_rays_versions_must_be_equal(there, here, state):
    assert told(services.assess_ray("http://ray", there, here))[0][0] == state


@pytest.mark.parametrize(
    ("there", "here", "lines"),
    [("3.17.1", "3.17.0", 0), ("3.16.0", "3.17.0", 1), ("3.16.0", None, 0)],
)
def test_mlflows_versions_may_differ_in_the_patch(there, here, lines):
    found = told(services.assess_mlflow("http://mlflow", there, here))
    assert [state for state, _ in found] == ["warning"] * lines


def test_a_real_mlflow_is_well(mlflow_uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    assert told(services.mlflow()) == [
        ("ok", f"MLflow at {mlflow_uri} answers a search of experiments")
    ]


def test_a_store_without_server_is_not_here(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    with pytest.raises(NotHereError, match="is no server"):
        list(services.mlflow())


def test_nodes_are_counted(monkeypatch):
    nodes = [{"state": "ALIVE"}, {"state": "DEAD"}, {"state": "ALIVE"}]
    with server({"/api/v0/nodes": {"data": {"result": {"result": nodes}}}}) as url:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", url)
        assert services.ray_nodes() == 2
    assert services.ray_nodes() == 0
