"""The first run's model as a user has it: promoted, rolled back, served, exported, made anew."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from functools import partial

import httpx
import openai
import pytest

from pipelines.core.machine import free_port
from pipelines.core.settings import PROJECT
from pipelines.platform.secrets import serve_token
from pipelines.serving.endpoint import MODEL_HEADER
from pipelines.serving.serving_engine import SERVING
from pipelines.tracking.tracked_run import MODEL_HASH_TAG
from tests.conftest import PENSTOCK
from tests.e2e.airflow_runs import wait_for
from tests.e2e.test_llm_pipeline import MODEL

PROMPT, TOKENS = "import ", 4


def said(platform, *arguments, timeout=120):
    done = platform.penstock(*arguments, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def second(platform_variables, first_run):
    """A second version of the same content; it is champion as long as the test runs."""
    from pipelines.registry import registry
    from pipelines.registry.registration import register

    first = registry.find(MODEL, "1")
    tags = {MODEL_HASH_TAG: first.model_hash}
    version = register([registry.verified_folder(first)], MODEL, None, tags, "once more")
    was = said(platform_variables, "models", "promote", version.label, "--why", "a trial")
    assert was == f"{version.label} is the champion now; before: 1\n"
    return version


def greedy(folder):
    """By plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


@contextmanager
def serving(platform, model):
    """`penstock serve`, and a way to ask it: a text, and the version that wrote it."""
    port = free_port()
    command = [PENSTOCK, "serve", model, "--port", str(port)]
    # A shell's background job, as these tests may be, passes on that Ctrl-C means nothing.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, env=platform.environment, cwd=PROJECT, preexec_fn=heed)
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key=serve_token(platform.settings),
        http_client=httpx.Client(trust_env=False, timeout=120),
        max_retries=0,
    )

    def answers():
        assert process.poll() is None
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success
        except httpx.TransportError:
            return False

    def ask(**options):
        asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        raw = client.completions.with_raw_response.create(**asked | options)
        return raw.parse().choices[0].text, raw.headers[MODEL_HEADER]

    try:
        wait_for(answers, "an engine", 240)
        yield ask
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    left = (platform.settings.home / SERVING).iterdir()
    assert {path.suffix for path in left} == {".log"}


def test_a_rollback_changes_what_is_served_and_refuses_no_request(platform, second):
    from pipelines.registry import registry

    text = greedy(registry.verified_folder(second))
    with serving(platform, f"{MODEL}@champion") as ask:
        assert ask() == (text, second.label)
        rolled = said(platform, "models", "rollback", MODEL, "--why", "it was one")
        assert rolled == f"{MODEL}@1 is the champion now; before: {second.version}\n"
        wait_for(lambda: ask() == (text, f"{MODEL}@1"), "the champion before", 240)
    shown = said(platform, "models", "show", MODEL)
    trail = [line.split(" UTC  ")[1] for line in shown.split("audit trail\n")[1].splitlines()]
    assert trail[0].startswith("promote none → 1 by run ")
    assert trail[-2].startswith(f"promote 1 → {second.version} by ")
    assert trail[-2].endswith(": a trial")
    assert trail[-1].startswith(f"rollback {second.version} → 1 by ")
    assert trail[-1].endswith(": it was one")


def test_what_somebody_was_at_is_one_line_from_every_command(
    platform, platform_variables, first_run, tmp_path
):
    from pipelines.registry import registry
    from pipelines.registry.registration import register

    first = registry.find(MODEL, "1")
    folder = registry.verified_folder(first)
    version = register([folder], MODEL, None, {MODEL_HASH_TAG: "tampered"}, "somebody was at it")
    (registry.verified_folder(version) / "README.md").write_text("# another")
    for command in (
        ["models", "promote", version.label],
        ["models", "export", version.label, "--to", str(tmp_path / "to")],
        ["models", "generate", version.label],
        ["models", "show", version.label, "--lineage"],
        ["serve", version.label, "--port", str(free_port())],
    ):
        refused = platform.penstock(*command)
        assert refused.returncode == 2, command
        line = refused.stderr.strip().splitlines()[-1]
        assert line == f"error: {version.label} is not what was signed: altered README.md"
        assert "Traceback" not in refused.stderr
    assert not (tmp_path / "to").exists()


def test_the_lineage_of_the_champion_leads_to_all_that_made_it(platform, first_run):
    shown = said(platform, "models", "show", f"{MODEL}@champion", "--lineage")
    head = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(head, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    for words in (
        commit.strip(),
        first_run["dag_run_id"],
        first_run["mlflow_run_id"],
        "fingerprint",
        "source sha256",
        "expectations",
        "Data Docs",
        "package lock",
        "Ray job of preprocess",
        "Ray job of train",
        "Ray job of evaluate",
        "checkpoint steps",
        "worker-hours",
    ):
        assert words in shown, words
    facts = json.loads(said(platform, "models", "show", MODEL, "--lineage", "--json"))
    shards = facts["records"]["preprocess"]["dataset"]["train"]["shards"]
    assert shards
    assert all(len(shard["md5"]) == 32 for shard in shards)
    assert {"dvc.lock", "requirements.lock"} <= {
        key for key, each in facts["sha256"].items() if each
    }
    assert facts["cost"]["train"]["seconds"] > 0
    assert facts["trained_on"]["cpu"]["threads"] > 0
    assert facts["checkpoints"]["steps"]


def test_an_export_is_the_model_in_transformers_and_in_tritons_repository(
    platform, first_run, tmp_path
):
    from transformers import AutoModelForCausalLM

    to = tmp_path / "folder"
    exported = json.loads(said(platform, "models", "export", MODEL, "--to", str(to), "--json"))
    assert exported["model"] == f"{MODEL}@1"
    assert AutoModelForCausalLM.from_pretrained(to).config.vocab_size == 2048
    repository = tmp_path / "repository"
    said(platform, "models", "export", MODEL, "--format", "triton", "--to", str(repository))
    assert (repository / MODEL / "1" / "model.py").is_file()
    assert (repository / MODEL / "config.pbtxt").is_file()


MLFLOW = """
eval "$({penstock} env)"
exec mlflow models serve --env-manager local --model-uri models:/{model}@champion --port {port}
"""


def test_mlflows_own_server_answers_too(platform, first_run):
    port = free_port()
    script = MLFLOW.format(penstock=shlex.quote(str(PENSTOCK)), model=MODEL, port=port)
    process = subprocess.Popen(
        ["bash", "-c", script], env=platform.environment, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    asked = {"dataframe_split": {"columns": ["prompt"], "data": [[PROMPT]]}}

    def answers():
        assert process.poll() is None
        try:
            return httpx.get(f"{url}/ping", trust_env=False).is_success
        except httpx.TransportError:
            return False

    try:
        wait_for(answers, "MLflow's server", 120)
        answer = httpx.post(f"{url}/invocations", json=asked, timeout=60, trust_env=False)
        (text,) = answer.json()["predictions"]
        assert text
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)
    # MLflow leaves a file of its own with the version, which is none the worse for it.
    assert said(platform, "models", "generate", MODEL, "--tokens", "1")


@pytest.mark.faults  # by hand: it trains once more
def test_the_weights_of_the_first_run_come_out_equal(platform, first_run):
    """Ray trained them on two processes; torchrun makes them once more."""
    began = time.monotonic()
    made = json.loads(said(platform, "models", "reproduce", f"{MODEL}@1", "--json", timeout=600))
    assert made["equal"]
    assert made["differing"] == []
    shutil.rmtree(made["workspace"])
    print(f"made once more in {time.monotonic() - began:.0f} s")
