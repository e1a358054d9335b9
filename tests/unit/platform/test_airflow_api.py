"""The client bears an Airflow that is away for a while, and says so in one line where it stays."""

import json
from http.server import HTTPServer

import pytest

from pipelines.core.errors import UnreachableError, UserError
from pipelines.core.settings import load_settings
from pipelines.platform import airflow_api
from pipelines.platform.airflow_api import AirflowApi
from tests.background_server import in_background
from tests.unit.platform.signs_in import SignsIn


class Handler(SignsIn):
    """An api-server whose database is away while `failing` is above zero.

    It has read no DAG while `unread` is above zero, and of all files it could not read `broken`.
    """

    failing = 0
    unread = 0
    broken = ()

    def do_GET(self):
        away = "dagRuns" in self.path and Handler.failing > 0
        Handler.failing -= away
        unread = "/dags/" in self.path and "dagRuns" not in self.path and Handler.unread > 0
        Handler.unread -= unread
        errors = [{"filename": name, "stack_trace": "E: no"} for name in Handler.broken]
        said = {"state": "success", "fileloc": "/p/dags/llm_pipeline.py", "import_errors": errors}
        self.send_response(500 if away else 404 if unread else 200)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())


@pytest.fixture
def airflow(monkeypatch, tmp_path):
    with in_background(HTTPServer(("127.0.0.1", 0), Handler)) as server:
        monkeypatch.setenv("PENSTOCK_SECRETS", str(tmp_path))
        (tmp_path / "airflow-password").write_text("any")
        monkeypatch.setenv("PENSTOCK_AIRFLOW_URL", f"http://127.0.0.1:{server.server_port}")
        yield AirflowApi(load_settings())


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


def test_the_broken_recipe_of_a_colleague_stops_no_run(airflow, monkeypatch):
    monkeypatch.setattr(airflow_api, "_POLL_S", 0.01)
    Handler.unread, Handler.broken = 3, ("/home/broken-recipes/theirs.py",)
    airflow.wait_for_dag("mine")
    assert Handler.unread == 0
    assert airflow.dag_file("mine") == "llm_pipeline"


@pytest.mark.parametrize("dag_id", ["mine", "mine.refresh"])
def test_a_dag_that_cannot_be_read_is_told_at_once(airflow, dag_id):
    Handler.unread, Handler.broken = 1000, ("/h/theirs.py", "/h/mine.py")
    with pytest.raises(UserError, match=r"^/h/mine\.py cannot be imported: E: no$"):
        airflow.wait_for_dag(dag_id)


def test_a_dag_that_never_appears_is_told_with_the_files_that_cannot_be_read(airflow, monkeypatch):
    monkeypatch.setattr(airflow_api, "_DAG_APPEARS_S", 0.0)
    Handler.unread, Handler.broken = 1000, ("/h/theirs.py",)
    with pytest.raises(UserError, match=r"has no DAG mine; see .*; /h/theirs\.py: E: no$"):
        airflow.wait_for_dag("mine")
