"""One run of the DAG for the whole session; whoever needs a finished run shares it."""

import json
import secrets
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest

from pipelines.orchestration.webhook import FILE
from tests.browser import airflow_page, take_picture
from tests.conftest import PENSTOCK

# Some third of the steps that the default recipe has time for, however long they take here: as the
# clock would end a busy machine's training after a few.
SHORTER = {"train.steps": 80, "train.max_seconds": 900}
# What a user's shell, from which a run is started, may hold.
IN_A_SHELL = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "HF_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "PGPASSWORD",
)


@dataclass
class WatchedRun:
    """A first `penstock run`, shorter than the default recipe, and what was seen meanwhile."""

    planted: dict[str, str]  # secrets in the shell that it was started from
    printed: str  # on stdout: its summary
    errors: str
    arguments: set[str]  # of all of the platform's processes


@pytest.fixture(scope="session")
def watched_run(platform):
    planted = {name: secrets.token_hex(16) for name in IN_A_SHELL}
    arguments = set()
    changes = (f"--set={name}={value}" for name, value in SHORTER.items())
    with subprocess.Popen(
        [PENSTOCK, "run", "--json", *changes],
        env=platform.environment | planted,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        while True:
            arguments |= _arguments(platform)
            try:
                printed, errors = run.communicate(timeout=1)
            except subprocess.TimeoutExpired:
                continue
            break
    assert run.returncode == 0, errors + "\n".join(
        f"{log}\n{log.read_text()[-3000:]}"
        for log in (platform.settings.home / "airflow/logs").rglob("attempt=*.log")
    )
    return WatchedRun(planted, printed, errors, arguments)


def _arguments(platform):
    lines = set()
    for process in platform.processes():
        with suppress(psutil.NoSuchProcess):
            lines.add("\0".join(process.cmdline()))
    return lines


@pytest.fixture(scope="session")
def first_run(watched_run):
    """The summary of a first `penstock run`, of a part of the default recipe."""
    return json.loads(watched_run.printed)


class _Hook(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append(json.loads(body))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def webhook(platform):
    """What the platform posts to its webhook, oldest first."""
    path = platform.settings.secrets / FILE
    with HTTPServer(("127.0.0.1", 0), _Hook) as server:
        server.seen = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        path.write_text(f"http://127.0.0.1:{server.server_port}/services/a-secret-of-the-hook")
        path.chmod(0o600)
        yield server.seen
        path.unlink()
        server.shutdown()


@pytest.fixture(scope="module")
def page(platform):
    """A page of headless Chromium, logged in to Airflow."""
    settings = platform.settings
    with airflow_page(settings.airflow_url, settings.airflow_password_path) as page:
        yield page


@pytest.fixture
def picture(page):
    """Takes a picture for the README, where the environment asks for it."""
    return partial(take_picture, page)
