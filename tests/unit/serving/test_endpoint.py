"""OpenAI's client, unchanged, against the endpoint over transformers' real server."""

import asyncio
import fcntl
import http.client
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from pipelines.core.errors import UserError
from pipelines.data.tokens.chat_encoder import make_chat_tokenizer
from pipelines.models.presets import preset
from pipelines.models.transformer import Transformer
from pipelines.recipe.data_section import Instruction
from pipelines.serving import following_engine
from pipelines.serving.endpoint import MODEL_HEADER, Endpoint, endpoint_server
from pipelines.serving.following_engine import FollowingEngine, engine_client, ready_engine
from pipelines.serving.serving_engine import Engine, leftovers, start_engine
from tests.unit.export.models import loud, small, write_registered

TOKEN, NAME, PROMPT, TOKENS = "secret", "my model", "hello", 8
TALK = [{"role": "user", "content": "hi"}]
# Takes what vLLM's command takes of ours, and says what that was.
VLLM = """#!/bin/sh
echo "$@" > "{folder}/arguments"
exec "{bin}/transformers" "$1" "$2" "$3" "$4" "$5" "$6"
"""


def chatty() -> Transformer:
    """With two tokens more, for a chat template's marks."""
    sizes = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 4, "hidden": 128}
    model = Transformer(replace(preset("llama-100k"), **sizes).sized(259, 48))
    model.init_weights(3)
    return loud(model)


class Served:
    """The endpoint in a thread, and which version the alias names.

    Version 1 was trained on conversations, 2 was not and is served by vLLM's command. Version 2 is
    also the shadow, from the beginning.
    """

    def __init__(self, folder: Path) -> None:
        self.version = 1
        models = {1: chatty(), 2: loud(small(), by=1.5)}
        self.folders = {
            number: write_registered(model, folder / str(number))
            for number, model in models.items()
        }
        make_chat_tokenizer(self.folders[1], Instruction(kind="messages"))
        self.engines: list[Any] = []
        self.home = folder / "home"
        self.shadow_home = folder / "shadow"
        first, second = asyncio.run(self.both())
        following = FollowingEngine(first, lambda: self.version, self.start_version)
        shadow = FollowingEngine(second, lambda: 2, self.start_shadow)
        endpoint = Endpoint(following, TOKEN, shadow)
        self.server = endpoint_server(endpoint.app, "127.0.0.1", 0)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.2)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    async def both(self) -> list[Engine]:
        starts = ((self.start_version, 1), (self.start_shadow, 2))
        return await asyncio.gather(*(ready_engine(*each) for each in starts))

    def start_shadow(self, version: int) -> Engine:
        return start_engine(NAME, version, self.folders[version], self.shadow_home)

    def start_version(self, version: int) -> Any:
        program = "transformers" if version == 1 else "vllm"
        folder = self.folders[version]
        self.engines.append(start_engine(NAME, version, folder, self.home, program))
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
    folder = tmp_path_factory.mktemp("serving")
    vllm = folder / "vllm"
    vllm.write_text(VLLM.format(folder=folder, bin=Path(sys.prefix) / "bin"))
    vllm.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        patch.setattr(following_engine, "_POLL_S", 0.2)
        made = Served(folder)
        yield made
        made.server.should_exit = True
        made.thread.join()
    assert all(engine.process.poll() is not None for engine in made.engines)
    assert sorted(path.name for path in made.home.iterdir()) == ["my-model-1.log", "my-model-2.log"]
    assert [path.name for path in made.shadow_home.iterdir()] == ["my-model-2.log"]
    arguments = (folder / "arguments").read_text().split()
    expected = ["serve", "my-model/2", "--host", "127.0.0.1", "--port", arguments[5]]
    assert arguments == [*expected, "--dtype", "float32"]


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


@torch.inference_mode()
def test_a_conversation_is_answered_as_generate_answers_it(served: Served) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(served.folders[1])
    model = AutoModelForCausalLM.from_pretrained(served.folders[1])
    chat = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, return_tensors="pt")
    made = model.generate(**chat, max_new_tokens=TOKENS, do_sample=False)
    expected = tokenizer.decode(made[0, chat.input_ids.shape[1] :], skip_special_tokens=True)
    create = served.client().chat.completions.create
    for limit in ("max_tokens", "max_completion_tokens"):
        answer = create(model=NAME, messages=TALK, temperature=0, **{limit: TOKENS})
        assert answer.choices[0].message.content == expected
    pieces = create(model=NAME, messages=TALK, temperature=0, max_tokens=TOKENS, stream=True)
    said = "".join(each.choices[0].delta.content or "" for each in pieces)
    assert said == expected.rstrip("\ufffd")
    # Where no number is asked for, there is an end all the same: the context's.
    whole = create(model=NAME, messages=TALK, temperature=0)
    assert whole.usage is not None
    assert whole.usage.total_tokens <= 48


def test_a_temperature_draws_and_a_seed_draws_the_same(served: Served) -> None:
    client = served.client()
    drawn = [
        ask(client, temperature=2, extra_body={"seed": seed}).choices[0].text for seed in (1, 2, 1)
    ]
    assert drawn[0] == drawn[2] != drawn[1]
    assert ask(client, max_tokens=None).usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"prompt": "x" * 60}, "has 60 tokens and max_tokens is 8, but the model sees 48 in all"),
        ({"max_tokens": 60}, "has 5 tokens and max_tokens is 60, but the model sees 48"),
        ({"max_tokens": None, "prompt": "x" * 48}, "has 48 tokens and max_tokens is 1"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number from 1"),
        ({"extra_body": {"max_tokens": "many"}}, "max_tokens is 'many'"),
        ({"prompt": ["a", "b"]}, "prompt must be one string"),
        ({"model": "../other/model"}, "there is no model '../other/model' here; 'my model' is"),
    ],
)
def test_a_wrong_request_is_one_clear_line(
    served: Served, wrong: dict[str, Any], line: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(served.client(), **wrong)
    assert line in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"messages": [{"role": "user", "content": "x" * 40}]}, "but the model sees 48 in all"),
        ({"max_completion_tokens": 40}, "max_tokens is 40, but the model sees 48"),
        ({"messages": []}, "messages must be a list of one or more"),
        ({"messages": ["hi"]}, "a message must have a role and a content, both text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "both text"),
    ],
)
def test_a_wrong_conversation_is_one_clear_line(
    served: Served, wrong: dict[str, Any], line: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        served.client().chat.completions.create(**{"model": NAME, "messages": TALK} | wrong)
    assert line in refused.value.message


def test_without_the_token_nothing_is_answered(served: Served) -> None:
    with pytest.raises(openai.AuthenticationError, match="use the endpoint's token"):
        ask(served.client("guess"))
    with pytest.raises(openai.AuthenticationError):
        served.client("other").models.list()


def test_what_was_answered_is_counted_for_prometheus(served: Served) -> None:
    url = f"http://127.0.0.1:{served.port}/metrics"
    assert httpx.get(url, trust_env=False).status_code == 401
    before = figures(url, served.version)
    with served.client() as client, served.client("wrong") as stranger:
        ask(client)
        for _ in ask(client, stream=True):
            pass
        with pytest.raises(openai.AuthenticationError):
            ask(stranger)
    after = figures(url, served.version)
    rise = {key: value - before.get(key, 0) for key, value in after.items()}
    assert rise["penstock_serve_answers_total", "200"] == 2
    assert rise["penstock_serve_answers_total", "401"] == 1
    assert rise["penstock_serve_first_byte_seconds_count", None] == 2
    assert rise["penstock_serve_answer_seconds_count", None] == 2
    first = rise["penstock_serve_first_byte_seconds_sum", None]
    assert 0 < first <= rise["penstock_serve_answer_seconds_sum", None]
    assert after["penstock_serve_in_flight", None] == 0


def figures(url: str, version: int, label: str = "status") -> dict[tuple[str, str | None], float]:
    """What Prometheus' own reader finds of a version, by name and one more label."""
    text = httpx.get(url, trust_env=False, headers={"authorization": f"Bearer {TOKEN}"}).text
    return {
        (sample.name, sample.labels.get(label)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("version") == str(version) and "le" not in sample.labels
    }


def compared(served: Served) -> dict[str, float]:
    """The shadow's answers so far, by whether they were the same."""
    found = figures(f"http://127.0.0.1:{served.port}/metrics", 2, "answer")
    name = "penstock_serve_shadow_compared_total"
    return {answer: found[name, answer] for answer in ("same", "other") if (name, answer) in found}


def wait_until(true: Callable[[], bool], pause: float = 0.2) -> None:
    limit = time.monotonic() + 600
    while not true():
        assert time.monotonic() < limit
        time.sleep(pause)


@pytest.mark.parametrize("stream", [False, True])
def test_a_shadow_gets_the_same_requests_and_its_answers_are_compared(
    served: Served, stream: bool
) -> None:
    before = compared(served)
    with served.client() as client:
        answer = ask(client, stream=stream)
        if stream:
            list(answer)
        ask(client, temperature=1)  # which says nothing of the models
    wait_until(lambda: compared(served).get("other", 0) > before.get("other", 0))
    assert compared(served).get("same") is None


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
        limit = time.monotonic() + 600
        while (
            len(served.engines) < 2 or not has_loaded(served.engines[-1])
        ) and time.monotonic() < limit:
            time.sleep(0.1)
        running.set()
        # An old answer that is on its way may come late on a busy machine.
        while set(seen[-100:]) != {f"{NAME}@2"} and time.monotonic() < limit:
            time.sleep(0.1)
        stop.set()
        for each in clients:
            each.result()
    assert seen[0] == f"{NAME}@1"
    assert seen[-1] == f"{NAME}@2"
    old = served.engines[0]
    wait_until(lambda: not old.home.exists())
    before = compared(served).get("same", 0)
    ask(served.client())
    # Now the shadow is what answers; what is still in its queue was answered by version 1, too.
    wait_until(lambda: compared(served).get("same", 0) > before)
    assert old.process.poll() is not None
    with pytest.raises(openai.BadRequestError, match="was not trained on conversations"):
        served.client().chat.completions.create(model=NAME, messages=TALK)


def test_the_endpoint_keeps_an_idle_connection_longer_than_a_client_does(served: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    with closing(connection):
        connection.connect()
        for _ in range(2):
            assert connection.sock is not None  # the same one
            connection.request("GET", "/health")
            assert connection.getresponse().read()
            time.sleep(6)  # httpx keeps one for 5


def test_an_engine_that_closes_an_idle_connection_loses_no_request() -> None:
    """The engine closes its connection just as a request is under way."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answered = time.monotonic()
        with suppress(asyncio.IncompleteReadError):  # the client has closed it
            while await reader.readuntil(b"\r\n\r\n"):
                if time.monotonic() - answered > 2:
                    break
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                answered = time.monotonic()
        writer.close()

    async def ask_twice() -> None:
        async with (
            await asyncio.start_server(answer, "127.0.0.1", 0) as server,
            engine_client() as client,
        ):
            port = server.sockets[0].getsockname()[1]
            for _ in range(2):
                assert (await client.get(f"http://127.0.0.1:{port}/health")).ok
                await asyncio.sleep(2.5)

    asyncio.run(ask_twice())


def test_of_an_engine_that_dies_under_load_the_next_one_answers_all(served: Served) -> None:
    """50 requests, some of them under way as it dies, and others while the next one loads."""
    expected = served.greedy(served.version)
    first = served.engines[-1]

    def one(number: int) -> str:
        if number >= 25:
            first.process.wait()
            time.sleep(number / 10)
        with served.client() as client:
            return str(ask(client.with_options(timeout=600)).choices[0].text)

    with ThreadPoolExecutor(50) as pool:
        answers = [pool.submit(one, number) for number in range(50)]
        wait_until(lambda: first.in_flight > 0, pause=0.001)
        first.process.kill()
        texts = {each.result() for each in answers}
    assert texts == {expected}
    assert served.engines[-1] is not first


def test_a_request_that_ends_two_engines_is_not_sent_to_a_third(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def ends(_: Endpoint, engine: Engine, *__: Any) -> Any:
        asked.append(engine)
        raise aiohttp.ServerDisconnectedError

    monkeypatch.setattr(Endpoint, "_ask", ends)
    with pytest.raises(openai.InternalServerError, match="two engines did not answer"):
        ask(served.client())
    assert len(asked) == 2


def test_a_tampered_folder_is_never_served(tmp_path: Path) -> None:
    source = write_registered(small(), tmp_path / "source")
    (source / "model.py").write_text("print('hello')")
    with pytest.raises(UserError, match="code"):
        start_engine("other", 1, source, tmp_path / "home")
    assert list((tmp_path / "home").iterdir()) == []


def test_a_server_that_is_not_installed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="`vllm` is not on PATH"):
        start_engine("m", 1, tmp_path, tmp_path / "home", "vllm")


def test_an_engine_that_ends_at_once_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_registered(small(), tmp_path / "source")

    def start(version: int) -> Any:
        engine = start_engine("m", version, source, tmp_path / "home", "transformers")
        engine.process.kill()
        return engine

    line = r"the server of m@1 was ended by SIGKILL; its log, .*m-1\.log, is empty"
    with pytest.raises(UserError, match=line):
        asyncio.run(ready_engine(start, 1))
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["m-1.log"]


def test_a_server_that_fails_says_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").write_text("#!/bin/sh\necho no such model\necho\nexit 3\n")
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    source = write_registered(small(), tmp_path / "source")

    def start(version: int) -> Any:
        return start_engine("m", version, source, tmp_path / "home", "vllm")

    line = r"m@1 ended with exit status 3; its log, .*, ends with: no such model$"
    with pytest.raises(UserError, match=line):
        asyncio.run(ready_engine(start, 1))


def test_what_a_killed_engine_left_is_found_and_what_runs_is_not(tmp_path: Path) -> None:
    for name in ("dead", "alive"):
        (tmp_path / name).mkdir()
    (tmp_path / "dead-1.log").write_text("")
    now = time.time() + 1
    with (tmp_path / "alive" / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [path.name for path in leftovers(tmp_path, now)] == ["dead"]
    assert [path.name for path in leftovers(tmp_path, now)] == ["alive", "dead"]
    assert list(leftovers(tmp_path, now - 100)) == []
