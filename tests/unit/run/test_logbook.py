"""The logbook holds each event once, whoever writes it, and is drawn among the run's artifacts."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import Process

import pytest

from pipelines.run.logbook import LOGBOOK, PAGE, Entry, note, read_logbook


def entry(key="a", **values) -> Entry:
    facts = {"kind": "worker lost", "stage": "train", "cause": "kill -9", "done": "restarted"}
    return Entry(key=key, **(facts | values))


def write_many(workspace) -> None:
    for number in range(20):
        note(workspace, entry(str(number)))


def test_two_processes_write_each_event_once(tmp_path):
    writers = [Process(target=write_many, args=(tmp_path,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(int(each.key) for each in read_logbook(tmp_path)) == list(range(20))


def test_the_page_is_whole_after_each_entry(tmp_path):
    artifacts = tmp_path / "a folder"
    (tmp_path / "run.json").write_text(json.dumps({"mlflow_artifacts": artifacts.as_uri()}))
    assert note(tmp_path, entry(step=7, worker_hours_lost=0.25, cause="a | b\nc"))
    assert not note(tmp_path, entry(cause="again"))
    note(tmp_path, entry("b", kind="resume"))
    rows = (artifacts / PAGE).read_text().splitlines()[4:]
    assert "| worker lost | train | 7 | a \\| b c | restarted | 0.2500 |" in rows[0]
    assert "| resume |" in rows[1]


def test_a_torn_line_costs_only_itself(tmp_path):
    note(tmp_path, entry("a"))
    with (tmp_path / LOGBOOK).open("a") as file:
        file.write('{"kind": "sta')
    note(tmp_path, entry("b"))
    assert [each.key for each in read_logbook(tmp_path)] == ["a", "b"]


def test_a_store_behind_the_tracking_server_is_written_through_it(tmp_path, monkeypatch):
    taken = {}

    class Server(BaseHTTPRequestHandler):
        def do_PUT(self):
            taken[self.path] = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self.send_response(200)
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
    place = {"mlflow_artifacts": "mlflow-artifacts:/1/abc/artifacts"}
    (tmp_path / "run.json").write_text(json.dumps(place))
    note(tmp_path, entry())
    server.shutdown()
    page = taken["/api/2.0/mlflow-artifacts/artifacts/1/abc/artifacts/logbook.md"]
    assert "worker lost" in page


def test_an_artifact_store_that_is_away_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    (tmp_path / "run.json").write_text(json.dumps({"mlflow_artifacts": "mlflow-artifacts:/1"}))
    assert note(tmp_path, entry())
    assert "logbook" in caplog.text
    assert len(read_logbook(tmp_path)) == 1


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind"):
        entry(kind="oddity")
