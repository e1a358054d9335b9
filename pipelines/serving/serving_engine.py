"""A version's server: transformers' or vLLM's own, one process, on a port of loopback.

What it serves is an export of its own, made of verified files when it starts and removed when it
stops, so nobody can have been at it before. A request is put into a form in which both servers mean
the same by it: no more tokens than the model's context holds, and text that is drawn at OpenAI's
temperature of 1 where none is asked for.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from pipelines.core.errors import UserError
from pipelines.core.machine import free_port
from pipelines.core.storage import read_json, write_json
from pipelines.data.tokens.chat_template import own_template
from pipelines.export.hf_folder import export_whole
from pipelines.export.triton_server import triton_name
from pipelines.models.model_folder import has_int4_kernels, is_int4, load_config

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from pipelines.data.tokens.chat_encoder import ChatEncoder

Program = Literal["transformers", "vllm"]  # whose server answers

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SERVING = "serving"  # under the home: logs, and the exports of the engines that run
_LOCK = ".lock"  # held by an engine while it runs, and by who started it
_COMPLETION_TOKENS = 16  # OpenAI's number where a completion asks for none
_GENERATION = "generation_config.json"
_LIMITS = ("max_completion_tokens", "max_tokens")  # OpenAI's new name, and its old one


@dataclass
class Engine:
    """`transformers serve` or `vllm serve` on a version's export."""

    name: str
    version: int
    home: Path  # the engine's working directory; it calls its model by the path from here
    port: int
    process: "subprocess.Popen[bytes]"
    lock: IO[bytes]
    log: Path
    in_flight: int = 0

    @property
    def model(self) -> str:
        """What the engine calls its model, and says in each answer."""
        return f"{triton_name(self.name)}/{self.version}"

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def prepare(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What the engine is sent for a request.

        Raises:
            UserError: it can't be answered.
        """
        if (name := body.get("model", self.name)) != self.name:
            raise UserError(f"there is no model {name!r} here; {self.name!r} is served")
        tokens = self._chat_tokens(body) if path == CHAT else self._text_tokens(body)
        left = self._context - tokens
        asked = next((body[key] for key in _LIMITS if body.get(key) is not None), None)
        if asked is None:
            asked = max(1, left if path == CHAT else min(left, _COMPLETION_TOKENS))
        if type(asked) is not int or asked < 1:
            raise UserError(f"max_tokens is {asked!r}; it must be a whole number from 1")
        if asked > left:
            raise UserError(
                f"the prompt has {tokens} tokens and max_tokens is {asked}, but the model sees "
                f"{self._context} in all"
            )
        # A `generation_config`, which transformers takes, too, could ask for any length.
        kept = {
            key: value for key, value in body.items() if key not in (*_LIMITS, "generation_config")
        }
        return kept | {"model": self.model, "max_tokens": asked}

    def stop(self) -> None:
        """End the process, and remove what it served."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.home, ignore_errors=True)
        self.lock.close()

    def _text_tokens(self, body: dict[str, Any]) -> int:
        text = body.get("prompt", "")
        if not isinstance(text, str):
            raise UserError("prompt must be one string")
        return len(self._tokenizer.encode(text).ids)

    def _chat_tokens(self, body: dict[str, Any]) -> int:
        if own_template(self.home / self.model) is None:
            raise UserError(f"{self.name} was not trained on conversations; use {COMPLETIONS}")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise UserError("messages must be a list of one or more")
        return len(self._chats.encode_prompt(tuple(map(_turn, messages))))

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.home / self.model / "tokenizer.json"))

    @cached_property
    def _chats(self) -> "ChatEncoder":
        from pipelines.data.tokens.chat_encoder import ChatEncoder

        return ChatEncoder(self.home / self.model)

    @cached_property
    def _context(self) -> int:
        return load_config(self.home / self.model).context_length


def start_engine(
    name: str,
    version: int,
    source: Path,
    home: Path,
    program: Program = "transformers",
) -> Engine:
    """Export a version and start its server, which then loads it.

    Args:
        name: The registered model's.
        version: Its number.
        source: The registered folder, verified.
        home: Exports and logs go there; made where missing.
        program: Whose server.

    Raises:
        UserError: the server is not installed, can't compute with these weights, or the source is
            no sound model.
    """
    command = [_find(program), "serve", f"{triton_name(name)}/{version}"]
    if program == "transformers" and not has_int4_kernels() and is_int4(source):
        raise UserError(
            f"{name}@{version} has int4 weights, and transformers computes with them by package "
            "mslk, for GPUs, which is not installed; install it, or run with a larger "
            "evaluate.budget_gb, for which int8 or bf16 is chosen"
        )
    home.mkdir(parents=True, exist_ok=True)
    port, log = free_port(), home / f"{triton_name(name)}-{version}.log"
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    place = Path(tempfile.mkdtemp(dir=home, prefix=f"{triton_name(name)}-{version}-"))
    lock = (place / _LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        _export(source, place / triton_name(name) / str(version))
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=place,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[lock.fileno()],  # one that outlives us holds it still
            )
    except BaseException:
        shutil.rmtree(place)
        lock.close()
        raise
    return Engine(name, version, place, port, process, lock, log)


def leftovers(home: Path, older_than: float) -> Iterator[Path]:
    """Exports from before a time whose engine was killed, and so was the process above it."""
    for place in sorted(path for path in home.glob("*") if path.is_dir()):
        if place.stat().st_mtime < older_than and not _is_held(place / _LOCK):
            yield place


def _is_held(lock: Path) -> bool:
    if not lock.is_file():
        return False
    with lock.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _find(program: Program) -> str:
    if program == "transformers":
        return str(Path(sys.prefix) / "bin" / program)
    if (found := shutil.which(program)) is None:
        raise UserError(f"no `{program}` is on PATH; install it, in an environment of its own")
    return found


def _export(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    export_whole(source, folder)
    path = folder / _GENERATION
    values = read_json(path) if path.is_file() else {}
    # Else transformers takes the likeliest token whatever temperature a client asks for.
    write_json(path, values | {"do_sample": True, "top_k": 0})


def _turn(message: Any) -> tuple[str, str]:
    """Role and text of a message, whose content may be in parts."""
    found = message if isinstance(message, dict) else {}
    role, content = found.get("role"), found.get("content")
    if isinstance(content, list):
        texts = [each.get("text") if isinstance(each, dict) else None for each in content]
        strings = [each for each in texts if isinstance(each, str)]
        content = "".join(strings) if len(strings) == len(texts) else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise UserError("a message must have a role and a content, both text")
    return role, content
