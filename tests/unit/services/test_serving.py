"""OpenAI's client, unchanged, against the endpoint over transformers' real server."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import uvicorn

from pipelines.core.errors import UserError
from pipelines.services import serving
from pipelines.services.preflight import free_port
from pipelines.services.serving import MODEL_HEADER, Endpoint, Engine, start_engine
from tests.unit.export.models import loud, small, write_registered

TOKEN, NAME, PROMPT, TOKENS = "secret", "my model", "hello", 8


class Served:
    """The endpoint in a thread, and which version the alias names."""

    def __init__(self, folder: Path) -> None:
        self.version = 1
        models = {1: small(), 2: loud(small(), by=1.5)}
        self.folders = {
            number: write_registered(model, folder / str(number))
            for number, model in models.items()
        }
        self.engines: list[Any] = []
        endpoint = Endpoint(NAME, lambda: self.version, self.start_version, TOKEN)
        self.home = folder / "home"
        self.home.mkdir()
        self.port = free_port()
        config = uvicorn.Config(endpoint.app, port=self.port, log_level="warning")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.2)

    def start_version(self, version: int) -> Any:
        self.engines.append(start_engine(NAME, version, self.folders[version], self.home))
        return self.engines[-1]

    def client(self, token: str = TOKEN) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1",
            api_key=token,
            http_client=httpx.Client(trust_env=False, timeout=120),
            max_retries=0,
        )

    @torch.inference_mode()
    def greedy(self, version: int) -> str:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folders[version])
        model = AutoModelForCausalLM.from_pretrained(self.folders[version])
        ids = tokenizer(PROMPT, return_tensors="pt").input_ids
        made = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
        return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(serving, "_POLL_S", 0.2)
        made = Served(tmp_path_factory.mktemp("serving"))
        yield made
        made.server.should_exit = True
        made.thread.join()
    assert all(engine.process.poll() is not None for engine in made.engines)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": NAME, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0} | options
    return client.completions.create(**given)


def test_greedy_output_is_that_of_generate_streamed_or_not(served: Served) -> None:
    expected = served.greedy(1)
    assert expected
    assert ask(served.client()).choices[0].text == expected
    pieces = [each.choices[0].text for each in ask(served.client(), stream=True)]
    assert len(pieces) > 2
    # transformers streams no half of a character, which the last byte here is.
    assert "".join(pieces) == expected.rstrip("\ufffd")
    assert [each.id for each in served.client().models.list()] == [NAME]


def test_a_wrong_request_is_one_clear_line(served: Served) -> None:
    with pytest.raises(openai.AuthenticationError, match="give the endpoint's token"):
        ask(served.client("guess"))
    with pytest.raises(openai.AuthenticationError):
        served.client("other").models.list()
    with pytest.raises(openai.BadRequestError, match="has 40 tokens and max_tokens is 8, but"):
        ask(served.client(), prompt="x" * 40)
    with pytest.raises(openai.BadRequestError, match="prompt must be one string"):
        ask(served.client(), prompt=["a", "b"])
    with pytest.raises(openai.BadRequestError, match="was not trained on conversations"):
        served.client().chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "hi"}]
        )


def has_loaded(engine: Engine) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{engine.url}/health", trust_env=False).is_success
    return False


def test_a_promotion_under_load_mixes_and_drops_nothing(served: Served) -> None:
    """50 at a time; each answer is wholly of the version that it names, the last of the new one.

    They walk while the new version loads, which takes the processors, and run as it takes over.
    """
    expected = {f"{NAME}@{version}": served.greedy(version) for version in (1, 2)}
    assert len(set(expected.values())) == 2
    seen: list[str] = []
    running, stop = threading.Event(), threading.Event()

    def go_on(_: int) -> None:
        with served.client() as client:
            while not stop.is_set():
                raw = client.completions.with_raw_response.create(
                    model=NAME, prompt=PROMPT, max_tokens=TOKENS, temperature=0
                )
                version = raw.headers[MODEL_HEADER]
                assert raw.parse().choices[0].text == expected[version]
                seen.append(version)
                running.wait(10)

    with ThreadPoolExecutor(50) as pool:
        clients = [pool.submit(go_on, number) for number in range(50)]
        served.version = 2
        limit = time.monotonic() + 240
        while (
            len(served.engines) < 2 or not has_loaded(served.engines[-1])
        ) and time.monotonic() < limit:
            time.sleep(0.1)
        running.set()
        while f"{NAME}@2" not in seen and time.monotonic() < limit:
            time.sleep(0.1)
        time.sleep(2)
        stop.set()
        for each in clients:
            each.result()
    assert seen[0] == f"{NAME}@1"
    assert seen[-1] == f"{NAME}@2"
    old = served.engines[0].process
    while old.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.2)


def test_an_engine_that_dies_is_started_again(served: Served) -> None:
    dead = served.engines[-1].process
    dead.kill()
    dead.wait()
    limit = time.monotonic() + 240
    while True:
        try:
            text = ask(served.client()).choices[0].text
            break
        except openai.InternalServerError as error:
            assert "started again" in str(error)
            assert time.monotonic() < limit
            time.sleep(0.5)
    assert text == served.greedy(served.version)


def test_a_tampered_folder_is_never_served(served: Served, tmp_path: Path) -> None:
    source = write_registered(small(), tmp_path / "source")
    (source / "model.py").write_text("print('hello')")
    with pytest.raises(UserError, match="code"):
        start_engine("other", 1, source, tmp_path)
