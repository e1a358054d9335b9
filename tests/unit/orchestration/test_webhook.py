"""The webhook: a real server that takes the request, refuses it, or is not there."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pipelines.core.machine import free_port
from pipelines.orchestration.webhook import FILE, VARIABLE, Notice, alerts_of, post
from pipelines.recipe import recipe_files
from tests.background_server import in_background

NOTICE = Notice(
    event="failed",
    dag="llm_pipeline",
    run="r1",
    task="train",
    error="train.lr: too high",
    links={"run": "http://airflow/r1"},
)
SECRET = "T0K3N"  # in the address's path, as chat services have it


class Hook(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, json.loads(body)))
        self.send_response(self.server.answer)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with in_background(HTTPServer(("127.0.0.1", 0), Hook)) as server:
        server.seen, server.answer = [], 204
        yield server


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "secrets").mkdir()
    return tmp_path


def address(port):
    return f"http://127.0.0.1:{port}/services/{SECRET}"


def test_without_an_address_nothing_is_sent():
    assert not post(NOTICE)


@pytest.mark.parametrize("how", ["variable", "file"])
def test_one_request_with_what_a_user_needs(server, home, monkeypatch, how):
    if how == "variable":
        monkeypatch.setenv(VARIABLE, address(server.server_port))
    else:
        (home / "secrets" / FILE).write_text(address(server.server_port) + "\n")
    assert post(NOTICE)
    assert server.seen == [(f"/services/{SECRET}", NOTICE.model_dump(mode="json"))]


def test_a_webhook_that_is_down_refuses_or_is_none_raises_nothing_and_shows_nothing(
    server, monkeypatch, caplog
):
    server.answer = 500
    with caplog.at_level("DEBUG"):
        for url in (address(server.server_port), address(free_port()), f"no url {SECRET}"):
            monkeypatch.setenv(VARIABLE, url)
            assert not post(NOTICE)
    assert len(server.seen) == 1
    assert "answered 500" in caplog.text
    assert SECRET not in caplog.text


def test_a_notice_names_the_addresses_of_the_recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_files, "PROJECT", tmp_path)
    (tmp_path / "recipes").mkdir()
    alerts = "{alerts: [ada@example.invalid, '#training']}"
    (tmp_path / "recipes/ours.yaml").write_text(f"name: ours\nschedule: {alerts}\n")
    (tmp_path / "recipes/broken.yaml").write_text("name: [")
    for dag_id in ("ours", "ours.refresh"):
        assert alerts_of(dag_id) == ("ada@example.invalid", "#training")
    assert alerts_of("llm_pipeline") == alerts_of("broken") == ()
