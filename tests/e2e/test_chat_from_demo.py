"""The chain out of the box: the demo's champion is fine-tuned, registered, served and asked."""

import json
import re
import signal
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from pipelines.core.machine import free_port
from tests.conftest import PENSTOCK

pytestmark = pytest.mark.long

MODEL = "penstock-chat"
# A model of one million parameters may have nothing to say to one of them on one machine's CPU.
NAMES = ["json.loads", "os.path.join", "str.split", "math.sqrt", "random.shuffle", "shutil.copy"]


@pytest.fixture(scope="module")
def chat_run(platform, first_run):
    steps = ("--set", "train.steps=120")
    done = platform.penstock("run", "--recipe", "chat-from-demo", *steps, "--json", timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@dataclass
class Endpoint:
    """`penstock serve` of the model, and OpenAI's client of it."""

    process: subprocess.Popen
    client: openai.OpenAI
    log: Path


@pytest.fixture(scope="module")
def endpoint(platform, chat_run, tmp_path_factory):
    port = free_port()
    command = [PENSTOCK, "serve", f"{MODEL}@champion", "--port", str(port)]
    log = tmp_path_factory.mktemp("serve") / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, env=platform.environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as server,
    ):
        watchdog = threading.Timer(120, server.kill)
        watchdog.start()
        try:
            address = server.stdout.readline().split()[-1]
            key = server.stdout.readline().strip().removeprefix("API key in ")
            token = Path(key).read_text().strip()
            transport = httpx.HTTPTransport(retries=20)
            http = httpx.Client(trust_env=False, timeout=60, transport=transport)
            client = openai.OpenAI(base_url=address, api_key=token, http_client=http)
            yield Endpoint(server, client, log)
        finally:
            watchdog.cancel()
            server.terminate()
            server.wait(30)


def test_the_champion_of_the_demo_becomes_a_chat_model_that_names_it(platform, chat_run):
    verdict = platform.settings.runs / chat_run["dag_run_id"] / "outputs/register/verdict.json"
    assert chat_run["verdict"] == "promoted", verdict.read_text()
    assert chat_run["model"] == {"name": MODEL, "version": 1, "aliases": ["champion"]}
    tree = json.loads(platform.penstock("models", "list", "--tree", "--json").stdout)
    assert tree[f"{MODEL}@1"] == "penstock-stdlib-code@1"


def test_pairs_of_answers_tune_it(platform, chat_run):
    steps = ("--set", "train.steps=60")
    done = platform.penstock("run", "--recipe", "dpo-demo", *steps, "--json", timeout=900)
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    assert run["model"]["name"] == "penstock-chat-dpo"
    outputs = platform.settings.runs / run["dag_run_id"] / "outputs/evaluate"
    found = json.loads((outputs / "record.json").read_text())["pairs"]
    assert found["right"]["lower"] > 0.5  # of pairs that it never saw
    assert found["margin"] > 0
    assert "Pairs of answers" in (outputs / "report.html").read_text()


def test_openais_client_gets_answers(endpoint):
    answers = [answer(endpoint.client, f"What does {name} do?") for name in NAMES]
    assert any(text.strip() for text in answers)
    assert "<|" not in "".join(answers)
    lines = re.findall(rf"{MODEL}@1: 200 in .* tokens, .* tokens/s", endpoint.log.read_text())
    assert len(lines) == len(NAMES)


def test_sigterm_waits_for_the_answers_under_way(endpoint):
    running = psutil.Process(endpoint.process.pid).children()
    assert running
    stream = endpoint.client.completions.create(
        model=MODEL, prompt="import", max_tokens=80, temperature=1, stream=True
    )
    pieces = [next(stream)]
    endpoint.process.send_signal(signal.SIGTERM)
    pieces += stream
    assert pieces[-1].choices[0].finish_reason in {"stop", "length"}
    assert endpoint.process.wait(60) == 0
    assert not any(engine.is_running() for engine in running)
    with pytest.raises(httpx.ConnectError):
        httpx.get(str(endpoint.client.base_url), trust_env=False)


def answer(client, question):
    (choice,) = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        max_tokens=48,
        temperature=0,
    ).choices
    assert choice.finish_reason in {"stop", "length"}
    return choice.message.content
