"""Forks of a Python that has imported what takes long: real processes, small imports."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipelines.platform import warm_python

# The server of these tests imports `wave`.
SHOW = """
import json, os, sys
import numpy
print(json.dumps({
    "warm": "wave" in sys.modules,
    "arguments": sys.argv[1:],
    "folder": os.getcwd(),
    "added": os.environ.get("ADDED"),
    "first": sys.path[0],
    "drawn": numpy.random.randint(2**31),
    "leads": os.getpgrp() == os.getpid(),
    "file": __file__,
    "ours": [each for each in sys.modules if each.startswith(("pipelines", "ray"))],
}))
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "code" / "show.py"
    path.parent.mkdir()
    path.write_text(SHOW)
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a Python file as Ray's node does, by a copy of the module whose imports are quick."""
    code = Path(warm_python.__file__).read_text()
    begins, ends = code.index("IMPORTS = ("), code.index("IDLE_S = 600.0")
    copy = tmp_path / "copy.py"
    code = code[:begins] + 'IMPORTS = ("wave", "numpy")\n' + code[ends:]
    copy.write_text(code.replace("IDLE_S = 600.0", "IDLE_S = 3.0"))
    place = tmp_path / "s"
    processes = []

    def begin(*arguments: object, **variables: str) -> subprocess.Popen[str]:
        environment = os.environ | {warm_python.SOCKET: str(place), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, str(copy), *map(str, arguments)]
        processes.append(
            subprocess.Popen(
                command,
                env=environment | variables,
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return processes[-1]

    yield begin
    for server in servers(tmp_path):  # and forks, which hold the pipes open
        server.kill()
    for process in processes:
        process.kill()
        process.communicate()


def servers(folder: Path) -> list[psutil.Process]:
    """The server and its forks, which still have its command line."""
    found = psutil.process_iter(["cmdline"])
    ours = [str(folder / "copy.py"), "--serve"]
    return [each for each in found if (each.info["cmdline"] or [])[1:3] == ours]


def warmed(start: Start, file: Path) -> None:
    """The first process is cold, and a server comes up for the next."""
    assert shown(start(file))["warm"] is False
    ends = time.monotonic() + 60
    while not (file.parents[1] / "s").exists():
        assert time.monotonic() < ends
        time.sleep(0.05)


def shown(process: subprocess.Popen[str]) -> dict[str, object]:
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    return dict(json.loads(out))


def long_lived(start: Start, file: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """Who has asked, and its fork."""
    file.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    asks = start(file)
    assert asks.stdout is not None
    return asks, psutil.Process(int(asks.stdout.readline()))


def context(**values: object) -> str:
    return f"--serialized-runtime-env-context={json.dumps(values)}"


def test_a_fork_is_as_a_new_python_but_for_what_is_imported(start: Start, file: Path) -> None:
    warmed(start, file)
    added = context(env_vars={"ADDED": "yes"}, py_executable=sys.executable, command_prefix=[])
    first = shown(start(file, "--a=1", "--language=PYTHON", added))
    drawn = first.pop("drawn")
    assert first == {
        "warm": True,
        "arguments": ["--a=1"],
        "folder": str(file.parents[1]),
        "added": "yes",
        "first": str(file.parent),
        "leads": True,  # Ray ends the group of a worker that ended, which must not be the server's
        "file": str(file),
        "ours": [],
    }
    second = shown(start(file))
    assert second["added"] is None
    assert second["drawn"] != drawn


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "LD_LIBRARY_PATH", "PYTHONHASHSEED"])
def test_what_is_read_only_once_must_be_as_it_was(variable: str, start: Start, file: Path) -> None:
    warmed(start, file)
    assert shown(start(file, **{variable: "7"}))["warm"] is False
    assert shown(start(file, PYTHONPATH="/elsewhere"))["warm"] is True


def test_what_asks_for_more_than_variables_is_left_to_ray(start: Start, file: Path) -> None:
    rays = file.with_name("setup_worker.py")
    rays.write_text("import sys; print(sys.argv)")
    warmed(start, file)
    for more in (context(command_prefix=["cd", "x", "&&"]), context(py_executable="uv run")):
        out, _ = start(file, "--a=1", more, "--language=PYTHON").communicate(timeout=60)
        assert out.strip() == str([str(rays), str(file), "--a=1", more, "--language=PYTHON"])


def test_the_two_processes_end_alike(start: Start, file: Path) -> None:
    warmed(start, file)
    file.write_text("import sys; sys.exit(7)")
    assert start(file).wait(60) == 7
    file.write_text("import os; os.kill(os.getpid(), 9)")
    assert start(file).wait(60) == -signal.SIGKILL
    asks, fork = long_lived(start, file)
    asks.kill()
    assert fork.wait(60) in (None, -signal.SIGKILL)


def test_who_asks_for_nothing_ends_no_server(start: Start, file: Path) -> None:
    warmed(start, file)
    for content in (b"", b"\0", b"\0\0\0\2{}"):
        with socket.socket(socket.AF_UNIX) as asker:
            asker.connect(str(file.parents[1] / "s"))
            asker.sendall(content)
    assert shown(start(file))["warm"] is True


def test_where_the_server_was_killed_its_forks_go_on_and_another_comes_up(
    start: Start, file: Path
) -> None:
    warmed(start, file)
    (server,) = servers(file.parents[1])
    _, fork = long_lived(start, file)
    server.kill()
    server.wait(60)
    (file.parents[1] / "s").unlink()
    file.write_text(SHOW)
    warmed(start, file)
    assert shown(start(file))["warm"] is True
    assert fork.is_running()


def test_a_place_that_is_gone_costs_only_time(start: Start, file: Path) -> None:
    elsewhere = {warm_python.SOCKET: str(file / "none" / "s")}
    assert shown(start(file, **elsewhere))["warm"] is False


def test_a_server_that_nobody_asks_ends(start: Start, file: Path) -> None:
    warmed(start, file)
    (server,) = servers(file.parents[1])
    server.wait(60)
    assert shown(start(file))["warm"] is False
