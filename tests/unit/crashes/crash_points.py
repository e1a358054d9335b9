"""Stops real code before each of its durable writes: there it dies, or another one runs meanwhile.

Python's audit events name each file that is opened for writing, moved or removed, each folder that
is made or removed, in vendors' code too; requests that change something are counted at `httpx`. So
"before write n", for each n, is every state that a `kill -9` can leave between two writes.
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


@contextmanager
def _counted(run: _Run) -> Iterator[None]:
    if not _hooked:
        sys.addaudithook(_hear)
        _hooked.append(True)
    send = httpx.AsyncHTTPTransport.handle_async_request

    async def counted(self: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        if request.method != "GET":
            run.write()
        return await send(self, request)

    httpx.AsyncHTTPTransport.handle_async_request = counted  # type: ignore[method-assign]
    sync, os.fsync = os.fsync, lambda _: None  # a `kill -9` loses nothing that the kernel has
    _running.append(run)
    try:
        yield
    finally:
        _running.clear()
        httpx.AsyncHTTPTransport.handle_async_request = send  # type: ignore[method-assign]
        os.fsync = sync


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


def meets(root: Path, act: Callable[[], object], stop: int, other: Callable[[], object]) -> bool:
    """Run an actor, and another one whole before its write `stop`; False: it made fewer.

    An other one that waits for a lock ends after the first one. An error of either is raised.
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
        thread.join(_BLOCKED_S)

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
