"""Starts the Python processes of a Ray node as copies of one that has imported the large packages.

A new Python takes some five seconds of a core to import PyTorch and what Ray needs, and a training
on two workers starts five. Here a server imports them once. Each process is then a fork of it, and
shares what it does not change of the server's memory.

Ray runs this file in place of its own `setup_worker.py` (`platform/ray_start.py`). It asks the
server for a fork, stays as the process that Ray knows, and ends as the fork does. Where no server
answers, the process starts as Ray would start it, and a server comes up for the next one. A server
that nobody has asked for ten minutes ends.

Before a fork nothing of ours is imported, as each run has its own code, and no Ray. A fork is
refused where a variable differs that is read once only, as a library is loaded. The socket lies in
a folder of the user to whom the node, the server and all forks belong.
"""

import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

SOCKET = "PENSTOCK_WARM_PYTHON"  # the variable with the path of the server's socket
IMPORTS = (
    "torch.distributed.fsdp",
    "mlflow.tracking",
    "pandas",
    # What Ray imports: itself it reads its variables, the job's id among them, as it is loaded.
    "aiohttp",
    "google.protobuf.json_format",
    "jsonschema",
    "msgpack",
    "pyarrow.compute",
    "requests",
    "yaml",
)
IDLE_S = 600.0
# How variables begin that are read once only; and those that begin so, but are read at any time.
READ_ONCE = (
    *("LD_", "LANG", "LC_", "PYTHON", "MALLOC_", "GLIBC_", "ARROW_", "TORCH", "PYTORCH"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
)
READ_AT_ANY_TIME = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED")
_ANSWER_S = 20.0
_HARMLESS = {"jemalloc_bg_thd"}  # a thread that knows of forks: https://jemalloc.net
# The options for `setup_worker.py` itself.
_SETUP = _CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main(arguments: list[str]) -> None:
    """Serve, or start the Python file that the arguments begin with, as Ray names it."""
    if arguments[0] == "--serve":
        request = serve(Path(arguments[1]))
        if request is not None:  # this is a fork
            _run(**request)
        return
    place = Path(os.environ[SOCKET])
    context, command = _split(arguments)
    if context is not None:
        _ask(place, command, os.environ | context)
    # Without a server a start only takes longer.
    with suppress(OSError, subprocess.SubprocessError):
        _start_server(place)
    _start_as_ray_does(arguments)


def _split(arguments: list[str]) -> tuple[dict[str, str] | None, list[str]]:
    """Return the variables that Ray's runtime environment adds, and the command without it.

    Without variables, as None: what the runtime environment asks for is more than that.
    """
    command = [each for each in arguments if not each.startswith(_SETUP)]
    added: dict[str, str] = {}
    for each in arguments:
        if each.startswith(_CONTEXT):
            context = json.loads(each.removeprefix(_CONTEXT))
            added = context.pop("env_vars", {})
            executable = context.pop("py_executable", sys.executable)
            if executable != sys.executable or any(context.values()) or "$" in str(added):
                return None, command
        elif each.startswith(_LANGUAGE) and each != f"{_LANGUAGE}PYTHON":
            return None, command
    return added, command


def _ask(place: Path, command: list[str], environment: dict[str, str]) -> None:
    """Become the shadow of a fork; returns where there is none."""
    request = {"command": command, "environment": environment, "folder": str(Path.cwd())}
    content = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(_ANSWER_S)
        try:
            server.connect(str(place))
            socket.send_fds(server, [struct.pack("!I", len(content))], [0, 1, 2])
            server.sendall(content)
            if server.recv(1) != b"+":
                return
        except OSError:
            return
        server.settimeout(None)
        status = server.recv(4)
    code = struct.unpack("!i", status)[0] if status else 1
    if code < 0:  # of a signal
        with suppress(OSError):  # SIGKILL is never handled
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _start_server(place: Path) -> None:
    """Start a server for the next process; the first of several servers stays."""
    command = [sys.executable, __file__, "--serve", str(place)]
    silent = subprocess.DEVNULL
    with place.with_suffix(".log").open("a") as log:
        subprocess.run(command, stdin=silent, stdout=log, stderr=log, check=True)


def _start_as_ray_does(arguments: list[str]) -> NoReturn:
    if any(each.startswith(_SETUP) for each in arguments):
        rays = Path(arguments[0]).with_name("setup_worker.py")
        arguments = [str(rays), *arguments]
    os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 (the same Python)


def serve(place: Path) -> dict[str, Any] | None:
    """Fork for each request, and return the request in the fork.

    Returns None in the server's parent, at once, and in the server when it has been idle for long.
    """
    if os.fork():
        return None
    os.setsid()
    if (lock := _lock(place)) is None:
        return None
    sys.path.pop(0)  # of this file
    environment = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as Ray sets it for a worker with one CPU
    _import()
    return _Server(place, lock, environment).serve()


def _lock(place: Path) -> int | None:
    """Return the file that the only server holds locked until it ends, or None for another one."""
    import fcntl

    lock = os.open(place.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return lock


def _import() -> None:
    import gc
    import importlib

    for name in IMPORTS:
        importlib.import_module(name)
    names = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    if threads := names - _HARMLESS - {Path("/proc/self/comm").read_text().strip()}:
        raise SystemExit(f"after its imports Python has threads, so it is not forked: {threads}")
    gc.collect()
    gc.freeze()  # a collection would write to each page


class _Server:
    """One process, without threads: it waits for requests, for its forks and for who asked."""

    def __init__(self, place: Path, lock: int, environment: dict[str, str]) -> None:
        self._lock, self._environment = lock, environment  # as it was before the imports
        self._forks: dict[int, tuple[int, socket.socket]] = {}  # its pidfd, and to who asked
        place.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(place))
        place.chmod(0o600)
        self._listener.listen(128)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any] | None:
        """Return in each fork, with its request; None once nobody has asked for long."""
        asked = time.monotonic()
        while self._forks or time.monotonic() - asked < IDLE_S:
            for key, _ in self._selector.select(IDLE_S):
                if key.fileobj is self._listener:
                    asked = time.monotonic()
                    if (request := self._accept()) is not None:
                        return request
                elif isinstance(key.fileobj, int):
                    self._ended(key.data)
                else:
                    self._abandon(key.data)
        return None

    def _accept(self) -> dict[str, Any] | None:
        """Fork as somebody asks for; returns the request in the fork alone."""
        asker, _ = self._listener.accept()
        asker.settimeout(_ANSWER_S)
        nonsense = (OSError, ValueError, KeyError, struct.error)
        with suppress(*nonsense), _received(asker) as (request, files):
            if not self._is_like(request["environment"]):
                asker.sendall(b"-")
            elif process := os.fork():
                ends = os.pidfd_open(process)
                self._forks[process] = ends, asker
                for each in (ends, asker):
                    self._selector.register(each, selectors.EVENT_READ, process)
                with suppress(OSError):  # who is gone is found by the selector
                    asker.sendall(b"+")
                return None
            else:
                self._leave(asker)
                for number, file in enumerate(files):
                    os.dup2(file, number)
                return request
        asker.close()
        return None

    def _is_like(self, environment: dict[str, str]) -> bool:
        """Return whether what is read once only is as it was when this process read it."""
        names = {
            name
            for name in (*environment, *self._environment)
            if name.startswith(READ_ONCE) and name not in READ_AT_ANY_TIME
        }
        return all(environment.get(name) == self._environment.get(name) for name in names)

    def _leave(self, asker: socket.socket) -> None:
        """In a fork: nothing of the server stays open, and so locked."""
        os.close(self._lock)
        self._selector.close()
        for ends, other in self._forks.values():
            os.close(ends)
            other.close()
        self._listener.close()
        asker.close()

    def _abandon(self, process: int) -> None:
        """Who asked is gone, so its fork goes, unless it has just ended."""
        if process in self._forks:
            os.kill(process, signal.SIGKILL)
            self._selector.unregister(self._forks[process][1])

    def _ended(self, process: int) -> None:
        """Tell who asked how its fork has ended."""
        ends, asker = self._forks.pop(process)
        self._selector.unregister(ends)
        os.close(ends)
        with suppress(KeyError):
            self._selector.unregister(asker)
        _, status = os.waitpid(process, 0)
        with suppress(OSError):
            asker.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
        asker.close()


@contextmanager
def _received(asker: socket.socket) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Give a request and the three files that it came with."""
    head, files, _, _ = socket.recv_fds(asker, 4, 3)
    try:
        (length,) = struct.unpack("!I", head)
        content = bytearray()
        while len(content) < length and (more := asker.recv(length - len(content))):
            content += more
        yield json.loads(content), files
    finally:
        for file in files:
            os.close(file)


def _run(command: list[str], environment: dict[str, str], folder: str) -> None:
    """Run a Python file as a new Python would."""
    import runpy

    import numpy as np

    os.setpgrp()  # Ray ends the group of a worker that has ended
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    np.random.seed()
    paths = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    own = [] if environment.get("PYTHONSAFEPATH") else [str(Path(command[0]).parent)]
    sys.path[:0] = own + paths
    sys.argv[:] = command
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
