"""Stops real code before each of its durable writes: there it dies, or another one runs meanwhile.

Python's audit events name each file that is opened for writing, moved or removed, each folder that
is made or removed, each request of an HTTP server, and each call of git, in vendors' code too. So
"before write n", for each n, is every state that a `kill -9` can leave between two writes. Two
actors also meet before each question to Ray.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_ON_PATHS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink")
_NO_STATE = (".lock", "/locks/", "/.dvc/tmp", "/.dvc/.gitignore")  # gone with the process, or DVC's
_CHANGES = (b"POST ", b"PUT ", b"PATCH ", b"DELETE ")
_GIT_READS = ("for-each-ref", "cat-file", "rev-parse")
_BLOCKED_S = 0.1  # an actor that has not ended by then waits for a lock of the one that is stopped
_MOST = 400


class Crash(BaseException):
    """The process died here; nothing that it did later, clean-up included, is ever written."""


class _Run:
    """One run of an actor that is stopped before its write number `stop`, counted from 0."""

    def __init__(self, root: Path, stop: int, meanwhile: Callable[[], None] | None) -> None:
        self.root, self.stop, self.meanwhile = str(root), stop, meanwhile
        self.count = 0
        self.dead = self.met = False
        self.lock = threading.RLock()

    def write(self) -> None:
        with self.lock:
            if self.dead:
                raise Crash
            if self.met:
                return
            self.count += 1
            if self.count <= self.stop:
                return
            if self.meanwhile is None:
                self.dead = True
                raise Crash
            self.met = True
        self.meanwhile()


_running: list[_Run] = []
_hooked: list[bool] = []


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if not _running:
        return
    if event == "http.client.send":
        if bytes(arguments[1]).startswith(_CHANGES):  # type: ignore[arg-type]
            _running[0].write()
        return
    if event == "subprocess.Popen":
        # What git does within one call is its own; `test_dataset_crashes` ends that, too.
        if arguments[0] == "git" and not set(_GIT_READS) & set(arguments[1]):  # type: ignore[call-overload]
            _running[0].write()
        return
    if event == "open":
        path, _, flags = arguments
        changes = isinstance(flags, int) and flags & _WRITES and not isinstance(path, int)
    elif event in _ON_PATHS:
        # A link is made at its second path; a file moves from its first.
        path, changes = arguments[event in ("os.link", "os.symlink")], True
    else:
        return
    name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    # A name alone is of a folder that is open, as `rmtree` removes them.
    changes = changes and (name.startswith(_running[0].root) or not name.startswith("/"))
    if event == "os.mkdir" and ("/dvc-cache/" in name or Path(name).exists()):
        changes = False  # nothing looks at an empty folder of the cache
    if changes and not any(part in name for part in _NO_STATE):
        _running[0].write()


def asked() -> None:
    """A server of the test is asked something: what changes after its answer is a point, too."""
    if _running:
        _running[0].write()


@contextmanager
def _counted(run: _Run) -> Iterator[None]:
    if not _hooked:
        sys.addaudithook(_hear)
        _hooked.append(True)
    transports = httpx.HTTPTransport, httpx.AsyncHTTPTransport
    send, send_async = httpx.HTTPTransport.handle_request, transports[1].handle_async_request

    def counted(self: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        if request.method != "GET":
            run.write()
        return send(self, request)

    async def counted_async(
        self: httpx.AsyncHTTPTransport, request: httpx.Request
    ) -> httpx.Response:
        if request.method != "GET" or run.meanwhile:  # another actor may change Ray's answer
            run.write()
        return await send_async(self, request)

    transports[0].handle_request = counted  # type: ignore[method-assign]
    transports[1].handle_async_request = counted_async  # type: ignore[method-assign]
    _running.append(run)
    try:
        yield
    finally:
        _running.clear()
        transports[0].handle_request = send  # type: ignore[method-assign]
        transports[1].handle_async_request = send_async  # type: ignore[method-assign]


def crashes(root: Path, act: Callable[[], object], stop: int) -> bool:
    """Run an actor; it dies before write `stop` of those below `root`. False: it made fewer."""
    run = _Run(root, stop, None)
    with _counted(run):
        try:
            act()
        except BaseException:
            if not run.dead:
                raise
    return run.dead


def meets(
    root: Path,
    act: Callable[[], object],
    stop: int,
    other: Callable[[], object],
    blocked_s: float = _BLOCKED_S,
) -> bool:
    """Run an actor, and another one whole before its write `stop`; False: it made fewer.

    An other one that waits for a lock, as it hasn't ended after `blocked_s`, ends after the first
    one. An error of either is raised.
    """
    errors: list[BaseException] = []

    def whole() -> None:
        try:
            other()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=whole)

    def meanwhile() -> None:
        thread.start()
        thread.join(blocked_s)

    run = _Run(root, stop, meanwhile)
    with _counted(run):
        try:
            act()
        finally:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]
    return run.met


def every_point(check: Callable[[int], bool]) -> int:
    """Call `check` with 0, 1, 2, ... until it returns False; return how many it returned True."""
    for stop in range(_MOST):
        if not check(stop):
            return stop
    raise AssertionError(f"more than {_MOST} writes")
