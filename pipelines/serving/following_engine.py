"""The engine of the version that an alias names, which changes while it answers."""

import asyncio
import logging
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import aiohttp

from pipelines.core.errors import UserError
from pipelines.serving.serving_engine import Engine

_POLL_S = 2.0  # between two checks of the alias
_START_S = 600.0  # an engine that takes longer to load has failed
_DIES_S = 2  # an engine whose connections have ended and that still runs is alive
DRAIN_S = 600.0  # an old engine is stopped after this time, even in the middle of an answer
# A request that is sent while the other side closes its idle connection is lost. So who asks must
# forget a connection first: clients after 5 seconds (httpx), and engines close theirs after 5.
_CLIENT_IDLE_S = 1
_log = logging.getLogger(__name__)


class FollowingEngine:
    """The engine that answers now; it is replaced when the alias moves or the process dies.

    A new version is loaded beside the old one, and gets all new requests from then on; the old one
    is stopped after its last answer.
    """

    def __init__(
        self, engine: Engine, latest: Callable[[], int], start: Callable[[int], Engine]
    ) -> None:
        """Begin with an engine that is ready.

        Args:
            engine: The first engine; `stop` stops it, too.
            latest: A function that returns the version that the alias names.
            start: A function that starts a version's engine.
        """
        self.now = engine
        self._latest, self._start = latest, start
        self._engines = [engine]  # the current engine, and old ones that still answer
        self._draining: set[asyncio.Task[None]] = set()
        self._replaced = asyncio.Condition()

    def in_flight(self) -> Counter[int]:
        """Return how many requests each version is answering."""
        found: Counter[int] = Counter()
        for engine in self._engines:  # a version that was restarted has two for a while
            found[engine.version] += engine.in_flight
        return found

    async def follow(self) -> None:
        """Follow the alias, and restart an engine that died, until this is cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                wanted = await asyncio.to_thread(self._latest)
                died = self.now.process.poll() is not None
                if died or self.now.version != wanted:
                    await self._change(wanted)
            except Exception:  # serving continues while the registry is unreachable
                _log.exception("could not update %s; the current engine stays", self.now.name)

    async def after(self, failed: Engine) -> Engine:
        """Return the engine to ask after one did not answer: the next one, if that has died.

        Raises:
            TimeoutError: There was no next one in time.
        """
        for _ in range(_DIES_S * 10):  # its connections end before the process does
            if self.now is not failed or failed.process.poll() is not None:
                break
            await asyncio.sleep(0.1)
        else:
            return failed
        async with asyncio.timeout(_POLL_S + _START_S), self._replaced:
            await self._replaced.wait_for(lambda: self.now is not failed)
        return self.now

    def stop(self) -> None:
        """End all engines, also in the middle of an answer."""
        for engine in list(self._engines):
            engine.stop()

    async def _change(self, version: int) -> None:
        engine = await ready_engine(self._start, version)
        self._engines.append(engine)
        async with self._replaced:
            old, self.now = self.now, engine
            self._replaced.notify_all()
        _log.info("serving %s@%d", engine.name, version)
        task = asyncio.create_task(self._drain(old))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)

    async def _drain(self, engine: Engine) -> None:
        """End an engine once it has answered all its requests."""
        for _ in range(int(DRAIN_S)):
            if not engine.in_flight:
                break
            await asyncio.sleep(1)
        await asyncio.to_thread(engine.stop)
        self._engines.remove(engine)


async def ready_engine(start: Callable[[int], Engine], version: int) -> Engine:
    """Start a version's engine, and wait until it has loaded its model.

    Raises:
        UserError: `start` raised it, or the engine ended or took too long.
    """
    starting = asyncio.ensure_future(asyncio.to_thread(start, version))
    try:
        engine = await asyncio.shield(starting)
    except asyncio.CancelledError:  # the thread continues, and would leave its engine running
        (await starting).stop()
        raise
    try:
        async with engine_client() as client:
            await _wait_ready(engine, client)
    except BaseException:
        engine.stop()
        raise
    return engine


async def _wait_ready(engine: Engine, client: aiohttp.ClientSession) -> None:
    for _ in range(int(_START_S)):
        if engine.process.poll() is not None:
            break
        with suppress(aiohttp.ClientError):
            async with client.get(f"{engine.url}/health") as answer:
                if answer.ok:
                    return
        await asyncio.sleep(1)
    code = engine.process.poll()
    if code is None:
        how = f"did not load its model within {_START_S:.0f} seconds"
    elif code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    else:
        how = f"ended with exit status {code}"
    raise UserError(
        f"the server of {engine.name}@{engine.version} {how}; its log, {engine.log}, "
        + (f"ends with: {last}" if (last := _last_line(engine.log)) else "is empty")
    )


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def engine_client() -> aiohttp.ClientSession:
    """Make a client for engines, which are on loopback: no proxy, and no limits.

    It reads HTTP in C: httpx, in Python, took half of the endpoint's time for each token.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_CLIENT_IDLE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        auto_decompress=False,
    )
