"""Preprocess on Ray gives what it gives in one process.

Each test's Ray is a process of its own: Ray reads its environment when it is imported.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.recipe import Recipe
from pipelines.core.recipe_files import dump_yaml
from pipelines.core.settings import PROJECT
from pipelines.core.storage import folder_hash, read_json
from pipelines.stages.preprocess import run

IN_ORDER = """
import ray
from ray_jobs.ray_map import map_on_ray

ray.init(log_to_driver=False)
assert list(map_on_ray(str, range(40))) == [str(number) for number in range(40)]
assert list(map_on_ray(str, [])) == []
"""
# Other tasks than in one process, the same documents.
SMALL_BATCHES = """
from pipelines.data import passes
from ray_jobs.preprocess import main

passes.LEAST_BLOCK_BYTES = 100_000
main()
"""


def on_ray(platform, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**platform.environment, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
    )


def recipe(path: Path, tokenizer: str = "bpe") -> Recipe:
    return Recipe.model_validate(
        {
            "name": "test",
            "data": {
                "source": {"kind": "files", "path": str(path)},
                "tokenizer": {"kind": tokenizer, "vocab_size": 400},
                "sequence_length": 16,
            },
        }
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    texts = [
        f"{number} Fischers Fritz 日本語 😀\r\n " * (number % 50 + 1) for number in range(3000)
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_results_come_in_order(platform, tmp_path: Path) -> None:
    done = on_ray(platform, IN_ORDER, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tokenizer", ["bpe", "char"])
def test_outputs_are_the_same_bytes_as_in_process(
    platform, corpus: Path, tmp_path: Path, tokenizer: str
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for workspace in (here, there):
        workspace.mkdir()
        (workspace / "params.yaml").write_text(dump_yaml(recipe(corpus, tokenizer)))
    run(recipe(corpus, tokenizer), here)
    done = on_ray(platform, SMALL_BATCHES, there)
    assert done.returncode == 0, done.stderr
    assert folder_hash(here / "outputs") == folder_hash(there / "outputs")


def test_a_persons_mistake_is_one_line_and_exit_code_2(platform, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "good"}\n{"text": \n')
    (tmp_path / "params.yaml").write_text(dump_yaml(recipe(broken)))
    done = on_ray(platform, SMALL_BATCHES, tmp_path)
    assert done.returncode == 2
    message = read_json(tmp_path / "error.json")["message"]
    assert "broken.jsonl" in message
    assert "2" in message
    assert "\n" not in message
