"""An OpenAI-compatible endpoint for a registered model that follows its alias.

An engine, one process per version on a loopback port, answers the requests. The endpoint in front
of it checks the token, names the model, and refuses requests that would break the engine. One
version answers a request, and its name is in the answer. When the endpoint is told to end, by
Ctrl-C or SIGTERM, it takes no new requests, and ends after its last answer.

The engine's own port asks for no token, so other users of a shared machine can reach it too.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pipelines.core.errors import UserError
from pipelines.serving.following_engine import DRAIN_S, FollowingEngine, engine_client
from pipelines.serving.serving_engine import CHAT, COMPLETIONS, Engine
from pipelines.serving.serving_metrics import ServingMetrics, Timer
from pipelines.serving.shadow import Shadow

MODEL_HEADER = "x-penstock-model"
_NO_TOKEN = "use the endpoint's token as the API key"  # noqa: S105
_IDLE_S = 75  # longer than a client keeps an idle connection, which httpx does for 5 seconds
_log = logging.getLogger(__name__)


def endpoint_server(app: Starlette, host: str, port: int) -> uvicorn.Server:
    """Make the server of an endpoint's application; its `run` ends with Ctrl-C or SIGTERM."""
    settings = uvicorn.Config(
        app,
        host,
        port,
        log_level="warning",
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=int(DRAIN_S),
    )
    return uvicorn.Server(settings)


class Endpoint:
    """An ASGI application, `app`, that passes requests to the current engine."""

    def __init__(
        self, engine: FollowingEngine, token: str, shadow: FollowingEngine | None = None
    ) -> None:
        """Prepare an application, which makes the engines follow their aliases once it runs.

        Args:
            engine: Answers; it is stopped with the application.
            token: The token that every request must carry.
            shadow: Gets a copy of each request that was answered, and is stopped with the
                application, too. Its answers are compared, and nobody waits for them.
        """
        self._engine, self._token = engine, token
        self._name = engine.now.name
        self._metrics = ServingMetrics()
        self._shadow = Shadow(shadow, self._metrics) if shadow else None
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
        async with engine_client() as self._client:
            tasks = [asyncio.create_task(self._engine.follow())]
            if self._shadow:
                tasks.append(asyncio.create_task(self._shadow.run(self._client)))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                    with suppress(asyncio.CancelledError):  # also stops an engine that is loading
                        await task
                self._engine.stop()

    async def _answer(self, request: Request) -> Response:
        if not self._knows(request):
            return self._refuse(401, _NO_TOKEN)
        try:
            body = await request.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return self._refuse(400, "the body must be a JSON object")
        path, began = request.url.path, time.perf_counter()
        # Choose the engine after reading the body: an engine without counted requests may end.
        engine = self._engine.now
        try:
            try:
                upstream = await self._ask(engine, path, body)
            except aiohttp.ClientError:
                # Nothing was answered yet, so another engine gets the request: once, and not again
                # and again, as it may be what ended the first one.
                engine = await self._engine.after(engine)
                upstream = await self._ask(engine, path, body)
        except UserError as error:
            return self._refuse(400, str(error))
        except (aiohttp.ClientError, TimeoutError) as error:
            return self._refuse(503, f"two engines did not answer: {type(error).__name__}: {error}")
        timer = self._metrics.timer(engine.version, began)
        return StreamingResponse(
            self._passed_on(engine, upstream, timer, path, body),
            upstream.status,
            media_type=upstream.headers.get("content-type"),
            headers={MODEL_HEADER: f"{self._name}@{engine.version}"},
        )

    async def _ask(self, engine: Engine, path: str, body: dict[str, Any]) -> aiohttp.ClientResponse:
        """Send a request to an engine, which counts it from now on, and return the answer's head.

        Raises:
            UserError: The request can't be answered.
            aiohttp.ClientError: The engine did not answer.
        """
        prepared = engine.prepare(path, body)
        engine.in_flight += 1
        try:
            return await self._client.post(engine.url + path, json=prepared)
        except BaseException:
            engine.in_flight -= 1
            raise

    async def _passed_on(
        self,
        engine: Engine,
        upstream: aiohttp.ClientResponse,
        timer: Timer,
        path: str,
        body: dict[str, Any],
    ) -> AsyncIterator[bytes]:
        kept: list[bytes] | None = [] if self._shadow and upstream.ok else None
        try:
            async for chunk in upstream.content.iter_any():
                timer.has_sent(chunk)
                if kept is not None:
                    kept.append(chunk)
                yield chunk
            if self._shadow and kept is not None:
                self._shadow.offer(path, body, b"".join(kept))
        finally:
            engine.in_flight -= 1
            _log.info("%s@%d: %s", self._name, engine.version, timer.has_ended(upstream.status))
            upstream.close()

    async def _models(self, request: Request) -> Response:
        if not self._knows(request):
            return _error(401, _NO_TOKEN)
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "penstock"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        ready = self._engine.now.process.poll() is None
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def _metrics_page(self, request: Request) -> Response:
        """Return our figures, and those of the current engine if it has any, as vLLM has."""
        if not self._knows(request):
            return _error(401, _NO_TOKEN)
        ours = self._metrics.text(self._engine.in_flight())
        theirs = b""
        with suppress(aiohttp.ClientError):
            async with self._client.get(f"{self._engine.now.url}/metrics") as answer:
                if answer.ok:
                    theirs = await answer.read()
        return Response(ours + theirs, media_type="text/plain; version=0.0.4")

    def _refuse(self, status: int, message: str) -> JSONResponse:
        self._metrics.refused(self._engine.now.version, status)
        return _error(status, message)

    def _knows(self, request: Request) -> bool:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self._token.encode())


def _error(status: int, message: str) -> JSONResponse:
    """Return an error response in OpenAI's format."""
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)
