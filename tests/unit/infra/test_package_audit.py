"""The audit of dependencies, by the real pip-audit; only OSV is ours, on the loopback."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipelines.core.machine import free_port
from pipelines.core.settings import PROJECT

BAD = {
    "id": "PYSEC-0000-1",
    "summary": "it lets everybody in",
    "published": "2020-01-01T00:00:00Z",
    "affected": [
        {
            "package": {"name": "a", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "2.0"}]}],
        }
    ],
}


class Osv(BaseHTTPRequestHandler):
    """Knows one vulnerability, of the packages that the server's `bad` names."""

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_bad = question["package"]["name"] in self.server.bad
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(json.dumps({"vulns": [BAD]} if is_bad else {}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def osv() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Osv) as server:
        server.bad, server.status = {"jinja2"}, 200
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def index() -> dict[str, str]:
    """An environment in which uv finds pip's index, from which pip-audit comes."""
    command = 'eval "$("$0" infra/pip_settings.py)" && env --null'
    shell = ["bash", "-c", command, sys.executable]
    listed = subprocess.run(shell, cwd=PROJECT, check=True, capture_output=True, text=True).stdout
    return dict(line.split("=", 1) for line in listed.rstrip("\0").split("\0"))


def audit(port: int, folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    lock = folder / "requirements.lock"
    lock.write_text("a==1.0\nb==1.0\n")
    variables |= {"PIP_AUDIT_OSV_URL": f"http://127.0.0.1:{port}/v1/query"}
    command = [sys.executable, PROJECT / "infra" / "package_audit.py", lock]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def test_a_known_vulnerability_ends_it(
    osv: ThreadingHTTPServer, tmp_path: Path, index: dict[str, str]
) -> None:
    osv.bad.add("b")
    ended = audit(osv.server_port, tmp_path, dict(index))
    assert ended.returncode == 1
    (line,) = [line for line in ended.stdout.splitlines() if "PYSEC-0000-1" in line]
    assert line.split()[:2] == ["b", "1.0"]


def test_what_is_accepted_is_named_and_does_not_end_it(
    osv: ThreadingHTTPServer, tmp_path: Path, index: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    osv.bad.add("a")
    monkeypatch.setitem(BAD, "aliases", ["CVE-2025-69872"])
    ended = audit(osv.server_port, tmp_path, dict(index))
    assert ended.returncode == 0
    assert "No known vulnerabilities found, 1 ignored" in ended.stderr


def test_where_nobody_can_be_asked_a_line_says_so(tmp_path: Path) -> None:
    ended = audit(free_port(), tmp_path, dict(os.environ))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("not audited: http://127.0.0.1:")
    assert ended.stdout.count("\n") == 1


def test_who_answers_and_knows_nothing_is_not_believed(
    osv: ThreadingHTTPServer, tmp_path: Path
) -> None:
    osv.bad.clear()
    assert (
        "knows no vulnerability of jinja2"
        in audit(osv.server_port, tmp_path, dict(os.environ)).stderr
    )
    osv.status = 503
    ended = audit(osv.server_port, tmp_path, dict(os.environ))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "answers HTTP Error 503" in ended.stderr
