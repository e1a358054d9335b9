"""A second model that gets a copy of the requests, and whose answers nobody waits for.

It is asked one request at a time, after the client has its answer, so a slow one takes little from
the first model. What does not fit into its queue is left out, and counted.
"""

import asyncio
import json
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from pipelines.core.errors import UserError
from pipelines.serving.following_engine import FollowingEngine
from pipelines.serving.serving_engine import Engine
from pipelines.serving.serving_metrics import ServingMetrics

_LONGEST_QUEUE = 100  # requests
_TIMEOUT = aiohttp.ClientTimeout(total=600)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Answered:
    path: str
    body: dict[str, Any]  # as the client sent it
    answer: bytes  # as the client got it


class Shadow:
    """Asks the second model what the first has answered, and counts what came of it."""

    def __init__(self, engine: FollowingEngine, metrics: ServingMetrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._queue: asyncio.Queue[_Answered] = asyncio.Queue(_LONGEST_QUEUE)

    def offer(self, path: str, body: dict[str, Any], answer: bytes) -> None:
        """Take a request and its answer for later, if there is room."""
        try:
            self._queue.put_nowait(_Answered(path, body, answer))
        except asyncio.QueueFull:
            self._metrics.shadow_left_out()

    async def run(self, client: aiohttp.ClientSession) -> None:
        """Ask until this is cancelled, and then stop the engines."""
        following = asyncio.create_task(self._engine.follow())
        try:
            while True:
                given = await self._queue.get()
                try:
                    await self._ask(client, given)
                except Exception:  # an answer that can't be read must not end the comparison
                    _log.exception("the shadow's answer could not be compared")
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
            self._engine.stop()

    async def _ask(self, client: aiohttp.ClientSession, given: _Answered) -> None:
        engine = self._engine.now
        engine.in_flight += 1
        began = time.perf_counter()
        try:
            status, answer = await _answer(client, engine, given)
        finally:
            engine.in_flight -= 1
        seconds = time.perf_counter() - began
        equal = None  # answers that are drawn at random would differ anyway
        if status == 200 and given.body.get("temperature") == 0:
            equal = _texts(answer) == _texts(given.answer)
        self._metrics.shadow_answered(engine.version, status, seconds, equal)
        said = {None: "not compared", True: "the same answer", False: "another answer"}[equal]
        who = f"{engine.name}@{engine.version}"
        _log.info("shadow %s: %d in %.2f s, %s", who, status, seconds, said)


async def _answer(
    client: aiohttp.ClientSession, engine: Engine, given: _Answered
) -> tuple[int, bytes]:
    """Return the engine's status and answer; 400 or 503, as clients get, if it wasn't asked."""
    left_out = ("model", "stream", "stream_options")
    body = {key: value for key, value in given.body.items() if key not in left_out}
    try:
        prepared = engine.prepare(given.path, body)
    except UserError:
        return 400, b""
    try:
        async with client.post(engine.url + given.path, json=prepared, timeout=_TIMEOUT) as reply:
            return reply.status, await reply.read()
    except (aiohttp.ClientError, TimeoutError):
        return 503, b""


def _texts(answer: bytes) -> list[str]:
    """Return the text of each choice of an answer, streamed or not."""
    if answer.startswith(b"data:"):
        lines = answer.decode().splitlines()
        data = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
        pieces = [json.loads(each) for each in data if each != "[DONE]"]
    else:
        pieces = [json.loads(answer)]
    texts: dict[int, str] = {}
    for piece in pieces:
        for choice in piece["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            number = choice.get("index", 0)
            texts[number] = texts.get(number, "") + (said.get("content") or "")
    return [texts[number] for number in sorted(texts)]
