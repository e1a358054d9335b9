"""The client bears an Airflow that is away for a while, and says so in one line where it stays."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pipelines.core.errors import UnreachableError, UserError
from pipelines.core.settings import load_settings
from pipelines.platform import airflow_api
from pipelines.platform.airflow_api import AirflowApi


class Handler(BaseHTTPRequestHandler):
    """An api-server whose database is away while `failing` is above zero."""

    failing = 0

    def do_GET(self):
        away = "dagRuns" in self.path and Handler.failing > 0
        Handler.failing -= away
        self.send_response(500 if away else 200)
        self.end_headers()
        self.wfile.write(b'{"state": "success"}')

    def do_POST(self):
        self.send_response(201)
        self.end_headers()
        self.wfile.write(b'{"access_token": "any"}')

    def log_message(self, *_):
        pass


@pytest.fixture
def airflow(monkeypatch, tmp_path):
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PENSTOCK_SECRETS", str(tmp_path))
    (tmp_path / "airflow-password").write_text("any")
    monkeypatch.setenv("PENSTOCK_AIRFLOW_URL", f"http://127.0.0.1:{server.server_port}")
    yield AirflowApi(load_settings())
    server.shutdown()
    server.server_close()


def test_an_airflow_without_its_database_is_asked_again(airflow):
    Handler.failing = 2
    assert airflow.run_state("a_dag", "a-run") == "success"


def test_one_that_stays_away_is_told_in_one_line(airflow, monkeypatch):
    Handler.failing = 1000
    monkeypatch.setattr(airflow_api.AirflowApi._get.retry, "stop", airflow_api.stop_after_delay(1))
    with pytest.raises(UnreachableError, match=r"Airflow has not answered .*500.* runs continue"):
        airflow.run_state("a_dag", "a-run")


def test_a_missing_password_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_SECRETS", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_AIRFLOW_USER", "watcher")
    with pytest.raises(UserError, match=r"/airflow-password: there is no password of watcher for"):
        AirflowApi(load_settings())
