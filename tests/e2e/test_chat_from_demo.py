"""The chain out of the box: the demo's champion is fine-tuned, registered, served and asked."""

import json
import subprocess
import threading
from pathlib import Path

import httpx
import openai
import pytest

from pipelines.core.machine import free_port
from tests.conftest import PENSTOCK

MODEL = "penstock-chat"
# A model of one million parameters may have nothing to say to one of them on one machine's CPU.
NAMES = ["json.loads", "os.path.join", "str.split", "math.sqrt", "random.shuffle", "shutil.copy"]


@pytest.fixture(scope="module")
def chat_run(platform, first_run):
    steps = ("--set", "train.steps=120")
    done = platform.penstock("run", "--recipe", "chat-from-demo", *steps, "--json", timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def client(platform, chat_run):
    """OpenAI's client of an endpoint that `penstock serve` opens."""
    port = free_port()
    command = [PENSTOCK, "serve", f"{MODEL}@champion", "--port", str(port)]
    with subprocess.Popen(
        command, env=platform.environment, stdout=subprocess.PIPE, text=True
    ) as server:
        watchdog = threading.Timer(120, server.kill)
        watchdog.start()
        try:
            address = server.stdout.readline().split()[-1]
            key = server.stdout.readline().strip().removeprefix("API key in ")
            token = Path(key).read_text().strip()
            transport = httpx.HTTPTransport(retries=20)
            http = httpx.Client(trust_env=False, timeout=60, transport=transport)
            yield openai.OpenAI(base_url=address, api_key=token, http_client=http)
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


def test_openais_client_gets_answers(client):
    answers = [answer(client, f"What does {name} do?") for name in NAMES]
    assert any(text.strip() for text in answers)
    assert "<|" not in "".join(answers)


def answer(client, question):
    (choice,) = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        max_tokens=48,
        temperature=0,
    ).choices
    assert choice.finish_reason in {"stop", "length"}
    return choice.message.content
