"""An OpenAI-compatible endpoint for a registered model that follows its alias.

transformers' own server answers, one process a version, on a port of loopback; in front of it this
asks for the token, names the model, refuses what would break it, and changes over: the new version
is loaded beside the old one, requests go to it from then on, and the old one ends with its last
answer. A request is answered by one version, whose name is in the answer.

The engine's own port asks for no token: on a machine that others share, it is theirs to reach too.
"""

import asyncio
import hmac
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pipelines.core.errors import UserError
from pipelines.export.huggingface import export_whole
from pipelines.export.source import new_folder
from pipelines.export.triton_server import triton_name
from pipelines.models.folder import (
    CONFIG,
    has_int4_kernels,
    is_int4,
    load_config,
    read_object,
)
from pipelines.services.preflight import free_port

if TYPE_CHECKING:
    from tokenizers import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL_HEADER = "x-penstock-model"
_POLL_S = 2.0  # between two looks at the alias
_START_S = 600.0  # an engine that takes longer to load has failed
_DRAIN_S = 600.0  # the longest answer that a change of version waits for
_log = logging.getLogger(__name__)


@dataclass
class Engine:
    """A version's server: `transformers serve` on its verified export."""

    name: str
    version: int
    home: Path  # the engine's working directory; it calls its model by the path from here
    port: int
    process: "subprocess.Popen[bytes]"
    in_flight: int = 0

    @property
    def model(self) -> str:
        """What the engine calls its model, and says in each answer."""
        return f"{triton_name(self.name)}/{self.version}"

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def refusal(self, path: str, body: dict[str, Any]) -> str | None:
        """Why a request can't be answered; None where it can."""
        folder = self.home / self.model
        if path == CHAT:
            has_template = (folder / "chat_template.jinja").is_file() or "chat_template" in (
                read_object(folder / "tokenizer_config.json")
            )
            if not has_template:
                return f"{self.name} was not trained on conversations; use {COMPLETIONS}"
            text = "".join(str(each.get("content", "")) for each in body.get("messages", ()))
        else:
            text = body.get("prompt", "")
        if not isinstance(text, str):
            return "prompt must be one string"
        tokens, asked = len(self._tokenizer.encode(text).ids), body.get("max_tokens") or 0
        if tokens + asked > self._context:
            return (
                f"the prompt has {tokens} tokens and max_tokens is {asked}, but the model sees "
                f"{self._context} in all"
            )
        return None

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.home / self.model / "tokenizer.json"))

    @cached_property
    def _context(self) -> int:
        return load_config(self.home / self.model).context_length


def start_engine(name: str, version: int, source: Path, home: Path) -> Engine:
    """Export a version, unless it is there, and start its server, which then loads it.

    Args:
        name: The registered model's.
        version: Its number.
        source: The registered folder.
        home: Exports and logs go there.
    """
    engine = f"{triton_name(name)}/{version}"
    if not has_int4_kernels() and is_int4(source):
        raise UserError(
            f"{name}@{version} has int4 weights, and transformers computes with them by package "
            "mslk, for GPUs, which is not installed; install it, or run with a larger "
            "evaluate.budget_gb, for which int8 or bf16 is chosen"
        )
    if not (home / engine / CONFIG).is_file():
        with new_folder(home / engine) as folder:
            export_whole(source, folder)
    port = free_port()
    command = [str(Path(sys.prefix) / "bin" / "transformers"), "serve", engine]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    with (home / f"{triton_name(name)}-{version}.log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    return Engine(name, version, home, port, process)


async def wait_ready(engine: Engine, client: httpx.AsyncClient) -> None:
    """Until the engine has loaded its model; raises UserError where it ends or takes too long."""
    for _ in range(int(_START_S)):
        if engine.process.poll() is not None:
            break
        with suppress(httpx.TransportError):
            if (await client.get(f"{engine.url}/health")).is_success:
                return
        await asyncio.sleep(1)
    raise UserError(
        f"transformers serve did not start with {engine.model}; "
        f"see {engine.home}/{engine.model.replace('/', '-')}.log"
    )


class Endpoint:
    """The door: an ASGI application, `app`, over the engine of the moment."""

    def __init__(
        self, name: str, latest: Callable[[], int], start: Callable[[int], Engine], token: str
    ) -> None:
        """Nothing is started before the application is.

        Args:
            name: The registered model's.
            latest: Says which version is to be served now.
            start: Starts a version's engine.
            token: Every request must bear it.
        """
        self._name, self._latest, self._start, self._token = name, latest, start, token
        self._engine: Engine | None = None
        self._engines: list[Engine] = []  # that one, one that loads, and those that end
        self._draining: set[asyncio.Task[None]] = set()
        routes = [
            Route(COMPLETIONS, self._answer, methods=["POST"]),
            Route(CHAT, self._answer, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:  # noqa: ARG002
        # The engine is on loopback: no proxy of the environment's, and answers take as long as
        # they take.
        async with httpx.AsyncClient(trust_env=False, timeout=None) as self._client:  # noqa: S113
            try:
                await self._change(await asyncio.to_thread(self._latest))
                following = asyncio.create_task(self._follow())
                yield
                following.cancel()
            finally:
                for engine in list(self._engines):
                    engine.stop()

    async def _follow(self) -> None:
        """Serve what the alias names, and start again what died."""
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                wanted = await asyncio.to_thread(self._latest)
                engine = self._engine
                died = engine is None or engine.process.poll() is not None
                if died or (engine is not None and engine.version != wanted):
                    await self._change(wanted)
            except Exception:  # a registry that is away for a while is no reason to stop serving
                _log.exception("%s stays as it is", self._name)

    async def _change(self, version: int) -> None:
        engine = await asyncio.to_thread(self._start, version)
        self._engines.append(engine)
        try:
            await wait_ready(engine, self._client)
        except UserError:
            await self._end(engine)
            raise
        old, self._engine = self._engine, engine
        _log.info("serving %s@%d", self._name, version)
        if old is not None:
            task = asyncio.create_task(self._drain(old))
            self._draining.add(task)
            task.add_done_callback(self._draining.discard)

    async def _drain(self, engine: Engine) -> None:
        """End an engine once it has answered all that it was asked."""
        for _ in range(int(_DRAIN_S)):
            if not engine.in_flight:
                break
            await asyncio.sleep(1)
        await self._end(engine)

    async def _end(self, engine: Engine) -> None:
        await asyncio.to_thread(engine.stop)
        self._engines.remove(engine)

    async def _answer(self, request: Request) -> Response:
        engine = self._engine
        if engine is None or not self._knows(request):
            return _error(401, "give the endpoint's token as the API key")
        try:
            body = await request.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return _error(400, "the body must be a JSON object")
        if refusal := engine.refusal(request.url.path, body):
            return _error(400, refusal)
        engine.in_flight += 1
        sent = self._client.build_request(
            "POST", engine.url + request.url.path, json=body | {"model": engine.model}
        )
        try:
            upstream = await self._client.send(sent, stream=True)
        except httpx.TransportError as error:
            engine.in_flight -= 1
            return _error(503, f"the engine does not answer ({error}); it is started again")
        return StreamingResponse(
            _passed_on(engine, upstream),
            upstream.status_code,
            media_type=upstream.headers.get("content-type"),
            headers={MODEL_HEADER: f"{self._name}@{engine.version}"},
        )

    async def _models(self, request: Request) -> Response:
        if self._engine is None or not self._knows(request):
            return _error(401, "give the endpoint's token as the API key")
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "penstock"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        ready = self._engine is not None and self._engine.process.poll() is None
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    def _knows(self, request: Request) -> bool:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self._token.encode())


async def _passed_on(engine: Engine, upstream: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in upstream.aiter_raw():
            yield chunk
    finally:
        engine.in_flight -= 1
        await upstream.aclose()


def _error(status: int, message: str) -> JSONResponse:
    """As OpenAI's clients read it."""
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)
