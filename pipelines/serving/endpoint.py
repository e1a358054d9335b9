"""An OpenAI-compatible endpoint for a registered model that follows its alias.

An engine, one process per version on a loopback port, answers the requests. The endpoint in front
of it checks the token, names the model, refuses requests that would break the engine, and switches
versions: it loads the new version beside the old one, sends it all new requests, and ends the old
one after its last answer. One version answers a request, and its name is in the answer.

The engine's own port asks for no token, so other users of a shared machine can reach it too.
"""

import asyncio
import hmac
import logging
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pipelines.core.errors import UserError
from pipelines.serving.serving_engine import CHAT, COMPLETIONS, Engine
from pipelines.serving.serving_metrics import ServingMetrics, Timer

MODEL_HEADER = "x-penstock-model"
_NO_TOKEN = "use the endpoint's token as the API key"  # noqa: S105
_POLL_S = 2.0  # between two checks of the alias
_START_S = 600.0  # an engine that takes longer to load has failed
_DRAIN_S = 600.0  # an old engine is stopped after this time, even in the middle of an answer
# A request that is sent while the other side closes its idle connection is lost. So who asks must
# forget a connection first: clients after 5 seconds (httpx), and engines close theirs after 5.
_SERVER_IDLE_S, _CLIENT_IDLE_S = 75, 1
_log = logging.getLogger(__name__)


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
        async with _client() as client:
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


def endpoint_server(app: Starlette, host: str, port: int) -> uvicorn.Server:
    """Make the server of an endpoint's application; its `run` ends with Ctrl-C."""
    settings = uvicorn.Config(
        app, host, port, log_level="warning", timeout_keep_alive=_SERVER_IDLE_S
    )
    return uvicorn.Server(settings)


class Endpoint:
    """An ASGI application, `app`, that passes requests to the current engine."""

    def __init__(
        self, engine: Engine, latest: Callable[[], int], start: Callable[[int], Engine], token: str
    ) -> None:
        """Prepare an application that follows the alias once it runs.

        Args:
            engine: The first engine; it is ready, and is stopped with the application.
            latest: A function that returns the version to serve now.
            start: A function that starts a version's engine.
            token: The token that every request must carry.
        """
        self._engine, self._latest, self._start, self._token = engine, latest, start, token
        self._name = engine.name
        self._engines = [engine]  # the current engine, and old ones that still answer
        self._draining: set[asyncio.Task[None]] = set()
        self._metrics = ServingMetrics()
        routes = [
            Route(COMPLETIONS, self._answer, methods=["POST"]),
            Route(CHAT, self._answer, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/metrics", self._metrics_page),
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:  # noqa: ARG002
        async with _client() as self._client:
            following = asyncio.create_task(self._follow())
            try:
                yield
            finally:
                following.cancel()
                with suppress(asyncio.CancelledError):  # this also stops an engine that is loading
                    await following
                for engine in list(self._engines):
                    engine.stop()

    async def _follow(self) -> None:
        """Serve the version that the alias names, and restart an engine that died."""
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                wanted = await asyncio.to_thread(self._latest)
                died = self._engine.process.poll() is not None
                if died or self._engine.version != wanted:
                    await self._change(wanted)
            except Exception:  # serving continues while the registry is unreachable
                _log.exception("could not update %s; the current engine stays", self._name)

    async def _change(self, version: int) -> None:
        engine = await ready_engine(self._start, version)
        self._engines.append(engine)
        old, self._engine = self._engine, engine
        _log.info("serving %s@%d", self._name, version)
        task = asyncio.create_task(self._drain(old))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)

    async def _drain(self, engine: Engine) -> None:
        """End an engine once it has answered all its requests."""
        for _ in range(int(_DRAIN_S)):
            if not engine.in_flight:
                break
            await asyncio.sleep(1)
        await asyncio.to_thread(engine.stop)
        self._engines.remove(engine)

    async def _answer(self, request: Request) -> Response:
        if not self._knows(request):
            return self._refuse(401, _NO_TOKEN)
        try:
            body = await request.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return self._refuse(400, "the body must be a JSON object")
        # Choose the engine after reading the body: an engine without counted requests may end.
        engine, path = self._engine, request.url.path
        try:
            body = engine.prepare(path, body)
        except UserError as error:
            return self._refuse(400, str(error))
        engine.in_flight += 1
        timer = self._metrics.timer(engine.version)
        try:
            upstream = await self._client.post(engine.url + path, json=body)
        except aiohttp.ClientError as error:
            engine.in_flight -= 1
            return self._refuse(503, f"the engine does not answer ({error}); it will be restarted")
        return StreamingResponse(
            _passed_on(engine, upstream, timer),
            upstream.status,
            media_type=upstream.headers.get("content-type"),
            headers={MODEL_HEADER: f"{self._name}@{engine.version}"},
        )

    async def _models(self, request: Request) -> Response:
        if not self._knows(request):
            return _error(401, _NO_TOKEN)
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "penstock"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        ready = self._engine.process.poll() is None
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def _metrics_page(self, request: Request) -> Response:
        """Return our figures, and those of the current engine if it has any, as vLLM has."""
        if not self._knows(request):
            return _error(401, _NO_TOKEN)
        in_flight: Counter[int] = Counter()
        for engine in self._engines:  # a version that was restarted has two for a while
            in_flight[engine.version] += engine.in_flight
        ours = self._metrics.text(in_flight)
        theirs = b""
        with suppress(aiohttp.ClientError):
            async with self._client.get(f"{self._engine.url}/metrics") as answer:
                if answer.ok:
                    theirs = await answer.read()
        return Response(ours + theirs, media_type="text/plain; version=0.0.4")

    def _refuse(self, status: int, message: str) -> JSONResponse:
        self._metrics.refused(self._engine.version, status)
        return _error(status, message)

    def _knows(self, request: Request) -> bool:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self._token.encode())


async def _passed_on(
    engine: Engine, upstream: aiohttp.ClientResponse, timer: Timer
) -> AsyncIterator[bytes]:
    try:
        async for chunk in upstream.content.iter_any():
            timer.has_sent()
            yield chunk
    finally:
        engine.in_flight -= 1
        timer.has_ended(upstream.status)
        upstream.close()


def _client() -> aiohttp.ClientSession:
    """Make the client for engines, which are on loopback: no proxy, and no limits.

    It reads HTTP in C: httpx, in Python, took half of the endpoint's time for each token.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_CLIENT_IDLE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        auto_decompress=False,
    )


def _error(status: int, message: str) -> JSONResponse:
    """Return an error response in OpenAI's format."""
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)
