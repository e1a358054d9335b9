"""`penstock serve` over real engines answers OpenAI's client and the evaluation harness alike."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pipelines.evaluation.harness import run_harness
from pipelines.recipe.recipe import Harness
from pipelines.serving.endpoint import Endpoint, endpoint_server
from pipelines.serving.following_engine import FollowingEngine, ready_engine
from pipelines.serving.serving_engine import start_engine
from tests.serving.models import (
    CONTEXT,
    PROMPTS,
    SHAPES,
    TALK,
    TOKENS,
    Registered,
    greedy,
    write_registered,
)
from tests.serving.servers import VLLM_ON_CPU, environment

pytestmark = pytest.mark.serving
NAME, TOKEN = "a model", "secret"
TASKS = Path(__file__).parents[1] / "unit" / "evaluation" / "tasks"
VLLM = """#!/bin/sh
exec "{place}/bin/vllm" "$@" --enforce-eager
"""


@dataclass
class Served:
    """An endpoint in a thread of this process."""

    engine: str
    port: int
    model: Registered

    def client(self) -> openai.OpenAI:
        client = httpx.Client(trust_env=False, timeout=300)
        return openai.OpenAI(base_url=self.url, api_key=TOKEN, http_client=client, max_retries=0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


ENGINES = [("vllm", "llama3"), *(("transformers", shape) for shape in SHAPES)]


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    program, shape = request.param
    model = write_registered(shape, "chat", folder)
    with pytest.MonkeyPatch.context() as patch:
        if program == "vllm":
            command = folder / "bin" / "vllm"
            command.parent.mkdir()
            command.write_text(VLLM.format(place=environment("vllm")))
            command.chmod(0o755)
            for name, value in VLLM_ON_CPU.items():
                patch.setenv(name, value)
            patch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
        start = partial(_start, model, folder / "home", program)
        engine = asyncio.run(ready_engine(start, 1))
        endpoint = Endpoint(FollowingEngine(engine, lambda: 1, start), TOKEN)
        server = endpoint_server(endpoint.app, "127.0.0.1", 0)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.2)
        yield Served(program, server.servers[0].sockets[0].getsockname()[1], model)
        server.should_exit = True
        thread.join()


def _start(model: Registered, home: Path, program: Any, version: int) -> Any:
    return start_engine(NAME, version, model.folder, home, program)


def text(model: Registered, prompt: Any) -> str:
    from transformers import AutoTokenizer

    (answer,) = greedy(model.folder, [prompt])
    decoded = AutoTokenizer.from_pretrained(model.folder).decode(answer, skip_special_tokens=True)
    return str(decoded).rstrip("\ufffd")  # the half of a character that an answer may end with


def test_texts_are_continued(served: Served) -> None:
    for prompt in PROMPTS:
        asked = {"model": NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        expected = text(served.model, prompt)
        answer = served.client().completions.create(**asked)
        assert answer.choices[0].text.rstrip("\ufffd") == expected
        pieces = served.client().completions.create(**asked, stream=True)
        said = "".join(each.choices[0].text for each in pieces if each.choices)
        assert said.rstrip("\ufffd") == expected


def test_a_conversation_is_answered(served: Served) -> None:
    create = served.client().chat.completions.create
    asked: dict[str, Any] = {"model": NAME, "messages": TALK, "temperature": 0}
    expected = text(served.model, TALK)
    answer = create(**asked, max_tokens=TOKENS)
    assert (answer.choices[0].message.content or "").rstrip("\ufffd") == expected
    pieces = create(**asked, max_tokens=TOKENS, stream=True)
    said = "".join(each.choices[0].delta.content or "" for each in pieces if each.choices)
    assert said.rstrip("\ufffd") == expected
    whole = create(**asked)
    assert whole.usage is not None
    assert whole.usage.total_tokens <= CONTEXT


def test_what_is_too_long_is_refused(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="but the model sees 128 in all"):
        served.client().completions.create(model=NAME, prompt="water " * 200, max_tokens=8)


# It asks for the likelihood of given tokens, which transformers' server does not say.
@pytest.mark.parametrize("served", ENGINES[:1], indirect=True, ids="-".join)
def test_the_harness_scores_the_endpoint_as_the_folder(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.chdir(TASKS)  # where the task's data are
    monkeypatch.setenv("OPENAI_API_KEY", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": NAME,
            "base_url": f"{served.url}/completions",
            "tokenizer": str(served.model.folder),
            "max_length": CONTEXT,
        },
        tasks=["numbers.yaml"],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    wanted = Harness(files=(str(TASKS / "numbers.yaml"),))
    expected = run_harness(served.model.folder, wanted, chat=False)
    (scores,) = found["results"].values()
    for each in expected.scores:
        assert scores[f"{each.metric},none"] == pytest.approx(each.value, abs=1e-6)
    assert expected.scores
