"""Preprocess on Ray gives what it gives in one process.

Each test's Ray is a process of its own: Ray reads its environment when it is imported.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pipelines.core.settings import PROJECT
from pipelines.core.storage import folder_hash
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import dump_yaml
from pipelines.stages.preprocess.preprocessing import run

# Other tasks than in one process, the same documents; so many of them at once.
SMALL_BLOCKS = """
import ray
from ray.data import DataContext, ExecutionResources

from pipelines.data import passes
from ray_jobs.stage_job import main

passes.LEAST_BLOCK_BYTES = 100_000
DataContext.get_current().execution_options.resource_limits = ExecutionResources(cpu={tasks})
main("preprocess")
"""
# The process of one task of the first pass is killed, once; each task notes that it began.
KILL_ONE = """
import os, signal
from pathlib import Path

from pipelines.stages.preprocess import preprocessing

extract, begun = preprocessing.extract, Path("begun.txt").absolute()

def killed_once(block, folder, **arguments):
    number = folder.name.split(".")[1]
    is_first = number not in (begun.read_text() if begun.exists() else "")
    with begun.open("a") as file:
        file.write(number + " ")
    if number == "00003" and is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    return extract(block, folder, **arguments)

preprocessing.extract = killed_once
"""


def on_ray(platform, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**platform.environment, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
    )


def recipe(path: Path, tokenizer: str) -> Recipe:
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


def same_bytes_as_in_process(
    platform, corpus: Path, folder: Path, tokenizer: str, code: str
) -> Path:
    """Run it in both ways; the workspace of Ray's."""
    here, there = folder / "here", folder / "there"
    for workspace in (here, there):
        workspace.mkdir()
        (workspace / "params.yaml").write_text(dump_yaml(recipe(corpus, tokenizer)))
    run(recipe(corpus, tokenizer), here)
    done = on_ray(platform, code, there)
    assert done.returncode == 0, done.stderr
    assert folder_hash(here / "outputs") == folder_hash(there / "outputs")
    return there


def test_outputs_are_the_same_bytes_as_in_process(platform, corpus: Path, tmp_path: Path) -> None:
    same_bytes_as_in_process(platform, corpus, tmp_path, "bpe", SMALL_BLOCKS.format(tasks=1))


def test_a_killed_worker_costs_its_own_blocks_only(platform, corpus: Path, tmp_path: Path) -> None:
    code = KILL_ONE + SMALL_BLOCKS.format(tasks=2)
    there = same_bytes_as_in_process(platform, corpus, tmp_path, "char", code)
    begun = Counter((there / "begun.txt").read_text().split())
    assert len(begun) > 10
    assert begun - Counter(set(begun)) == {"00003": 1}
