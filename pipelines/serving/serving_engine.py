"""The server of one version: transformers' or vLLM's own, one process on a loopback port.

It serves its own export, which is made from verified files when it starts and removed when it
stops, so nobody can have changed it before. A request is rewritten so that both servers treat it in
the same way: at most as many tokens as the model's context holds, and sampling at OpenAI's default
temperature of 1.
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
from pipelines.models.model_folder import has_int4_kernels, is_int4, load_config, stated_type

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from pipelines.data.tokens.chat_encoder import ChatEncoder

Program = Literal["transformers", "vllm"]  # the program whose server answers

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SERVING = "serving"  # a folder in the home folder: logs, and the exports of running engines
_LOCK = ".lock"  # held by an engine while it runs, and by the process that started it
_COMPLETION_TOKENS = 16  # OpenAI's default for completions
_GENERATION = "generation_config.json"
_LIMITS = ("max_completion_tokens", "max_tokens")  # OpenAI's new name, and its old one


@dataclass
class Engine:
    """A process of `transformers serve` or `vllm serve` with a version's export."""

    name: str
    version: int
    program: Program
    home: Path  # the engine's working directory; the model's name is its path in here
    port: int
    process: "subprocess.Popen[bytes]"
    lock: IO[bytes]
    log: Path
    in_flight: int = 0

    @property
    def model(self) -> str:
        """The model's name in the engine and in each of its answers."""
        return f"{triton_name(self.name)}/{self.version}"

    @property
    def url(self) -> str:
        """The address at which the engine listens."""
        return f"http://127.0.0.1:{self.port}"

    def prepare(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body to send to the engine for a request.

        Raises:
            UserError: The request cannot be answered.
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
        # transformers also accepts a `generation_config`, which could ask for any length.
        kept = {
            key: value for key, value in body.items() if key not in (*_LIMITS, "generation_config")
        }
        return kept | {"model": self.model, "max_tokens": asked}

    def stop(self) -> None:
        """End the process, and remove its export."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.home, ignore_errors=True)
        self.lock.close()

    def _text_tokens(self, body: dict[str, Any]) -> int:
        """Return the tokens of the prompt, or of the longest of several."""
        prompt = body.get("prompt", "")
        several = self.program == "vllm" and isinstance(prompt, list) and not _are_ids(prompt)
        return max(map(self._prompt_tokens, prompt if several and prompt else [prompt]))

    def _prompt_tokens(self, prompt: Any) -> int:
        if isinstance(prompt, str):
            return len(self._tokenizer.encode(prompt).ids)
        if self.program == "vllm" and _are_ids(prompt):
            return len(prompt)
        raise UserError("prompt must be one string (with vLLM also token ids, or a list of these)")

    def _chat_tokens(self, body: dict[str, Any]) -> int:
        if own_template(self.home / self.model) is None:
            raise UserError(f"{self.name} was not trained on conversations; use {COMPLETIONS}")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise UserError("messages must be a list of one or more messages")
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
        name: The registered model's name.
        version: The version's number.
        source: The verified registered folder.
        home: The folder for exports and logs; created if missing.
        program: The program whose server is started.

    Raises:
        UserError: The server is not installed or cannot compute with these weights, or the source
            is not a valid model.
    """
    port, log = free_port(), home / f"{triton_name(name)}-{version}.log"
    command = _command(name, version, source, program, port)
    home.mkdir(parents=True, exist_ok=True)
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
                process_group=0,  # Ctrl-C in a terminal must not cut its answers
                pass_fds=[lock.fileno()],  # an engine that outlives this process still holds it
            )
    except BaseException:
        shutil.rmtree(place)
        lock.close()
        raise
    return Engine(name, version, program, place, port, process, lock, log)


def _command(name: str, version: int, source: Path, program: Program, port: int) -> list[str]:
    """Return the command of a server on this machine; it names the model as `Engine.model` does."""
    command = [_find(program), "serve", f"{triton_name(name)}/{version}"]
    if program == "transformers" and not has_int4_kernels() and is_int4(source):
        raise UserError(
            f"{name}@{version} has int4 weights, for which transformers needs the GPU package "
            "mslk, which is not installed; install it, or run again with a larger "
            "evaluate.budget_gb, so that int8 or bf16 is chosen"
        )
    command += ["--host", "127.0.0.1", "--port", str(port)]
    if program == "vllm" and (weights := stated_type(source)):
        command += ["--dtype", weights]  # its own choice rounds weights in fp32 to 16 bits
    return command


def leftovers(home: Path, older_than: float) -> Iterator[Path]:
    """Yield exports older than a time, of which no engine or starting process is alive."""
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
        raise UserError(f"`{program}` is not on PATH; install it in an environment of its own")
    return found


def _export(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    export_whole(source, folder)
    path = folder / _GENERATION
    values = read_json(path) if path.is_file() else {}
    # Otherwise transformers takes the most likely token at any temperature that a client sets.
    write_json(path, values | {"do_sample": True, "top_k": 0})


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(id_) is int for id_ in prompt)


def _turn(message: Any) -> tuple[str, str]:
    """Return the role and the text of a message, whose content may be in parts."""
    found = message if isinstance(message, dict) else {}
    role, content = found.get("role"), found.get("content")
    if isinstance(content, list):
        texts = [each.get("text") if isinstance(each, dict) else None for each in content]
        strings = [each for each in texts if isinstance(each, str)]
        content = "".join(strings) if len(strings) == len(texts) else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise UserError("a message must have a role and a content, both text")
    return role, content
