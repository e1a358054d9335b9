"""The container beside Ray's that keeps its logs: all that is written, and nothing twice."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.core.settings import PROJECT
from tests.unit.infra.manifests import pods, render

SCRIPT = PROJECT / "infra" / "images" / "keep-ray-logs.sh"


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """Ray's own folders, and a script that looks for them here."""
    logs = tmp_path / "ray" / "session_1" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "ray" / "session_latest").symlink_to(logs.parent)
    script = SCRIPT.read_text().replace("logs=/tmp/ray/", f"logs={tmp_path}/ray/")
    (tmp_path / "keep").write_text(script)
    (tmp_path / "keep").chmod(0o755)
    return logs


@pytest.fixture
def keeper(session: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    settings = {"PENSTOCK_HOME": str(tmp_path / "home"), "STILL_S": "2", "EVERY_S": "0.2"}
    started = subprocess.Popen([tmp_path / "keep", "node-1"], env=os.environ | settings)
    yield started
    started.kill()
    started.wait()


def until(path: Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() or path.read_text() != text:
        assert time.monotonic() < deadline, path.read_text() if path.exists() else path
        time.sleep(0.1)


def test_what_a_node_wrote_is_there_when_the_node_is_not(
    session: Path, keeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    kept = tmp_path / "home" / "ray-logs" / "node-1"
    (session / "raylet.out").write_text("one\n")
    until(kept / "raylet.out", "one\n")
    with (session / "raylet.out").open("a") as file:
        file.write("two\n")
    (session / "events").mkdir()
    (session / "events" / "event.log").write_text("an event\n")
    until(kept / "raylet.out", "one\ntwo\n")
    until(kept / "events" / "event.log", "an event\n")
    (session / "raylet.out").write_text("anew\n")  # as when Ray rotates it
    until(kept / "raylet.out", "anew\n")
    (older,) = kept.glob("raylet.out.*")
    assert older.read_text() == "one\ntwo\n"
    keeper.send_signal(signal.SIGTERM)  # it and Ray at once: Ray takes a moment to end
    time.sleep(1)
    with (session / "raylet.out").open("a") as file:
        file.write("last words\n")
    assert keeper.wait(30) == 0
    shutil.rmtree(session)
    assert (kept / "raylet.out").read_text() == "anew\nlast words\n"


def test_copies_of_long_ago_make_room(session: Path, tmp_path: Path) -> None:
    kept = tmp_path / "home" / "ray-logs"
    for days, node in ((15, "long-ago"), (13, "lately")):
        (kept / node).mkdir(parents=True)
        (kept / node / "raylet.out").write_text("one\n")
        then = time.time() - days * 86400
        os.utime(kept / node / "raylet.out", (then, then))
    settings = {"PENSTOCK_HOME": str(tmp_path / "home"), "STILL_S": "0", "EVERY_S": "0.2"}
    (session / "raylet.out").write_text("now\n")
    started = subprocess.Popen([tmp_path / "keep", "node-1"], env=os.environ | settings)
    until(kept / "node-1" / "raylet.out", "now\n")
    started.send_signal(signal.SIGTERM)
    assert started.wait(30) == 0
    assert sorted(path.parent.name for path in kept.glob("*/raylet.out")) == ["lately", "node-1"]


def test_each_ray_node_has_it_and_reads_what_ray_writes() -> None:
    for name in ("ray-head", "ray-cpu", "ray-gpu"):
        ray, logs = pods(render())[name]["spec"]["containers"][:2]
        folder = {"name": "ray-logs", "mountPath": "/tmp/ray"}
        assert folder in ray["volumeMounts"]
        assert folder | {"readOnly": True} in logs["volumeMounts"]
        assert "logs=/tmp/ray/session_latest/logs\n" in SCRIPT.read_text()
        assert logs["command"][2:] == [f"/opt/penstock/infra/images/{SCRIPT.name}", "$(NODE)"]
        assert logs["image"] == ray["image"]
        home = {"name": "home", "mountPath": "/var/lib/penstock"}
        assert home in logs["volumeMounts"]
