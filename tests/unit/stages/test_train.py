import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipelines.core.progress import ProgressReader
from pipelines.core.recipe import Recipe
from pipelines.core.records import (
    DatasetRef,
    PreprocessRecord,
    Shard,
    Split,
    TrainRecord,
    output_folder,
)
from pipelines.core.storage import folder_hash, md5
from pipelines.data.token_shards import ShardWriter

VOCABULARY = 60
RECIPE = Recipe.model_validate(
    {
        "name": "tiny",
        "data": {"sequence_length": 16},
        "model": {"preset": "llama-100k"},
        "train": {
            "steps": 6,
            "warmup_steps": 1,
            "micro_batch_size": 2,
            "global_batch_size": 6,
            "log_every": 1,
        },
    }
)


def write_split(folder: Path, name: str, seed: int) -> Split:
    writer = ShardWriter(folder / "tokens" / f"{name}-00000", VOCABULARY)
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, 2000).astype(np.uint16)
    writer.add(ids)
    writer.close()
    path = folder / "tokens" / f"{name}-00000.bin"
    shard = Shard(
        path=f"tokens/{path.name}",
        md5=md5(path),
        index_md5=md5(path.with_suffix(".idx")),
        bytes=path.stat().st_size,
        tokens=2000,
    )
    return Split(documents=1, bytes=2000, tokens=2000, shards=(shard,))


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return make_workspace(tmp_path / "work space")


def make_workspace(workspace: Path) -> Path:
    """What preprocess would have left: random tokens and a tokenizer of words."""
    from tokenizers import Tokenizer, models

    folder = output_folder(workspace, "preprocess")
    (folder / "tokens").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    words = {f"w{number}": number for number in range(1, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0} | words, unk_token="w1"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    dataset = DatasetRef(
        vocab_size=VOCABULARY,
        train=write_split(folder, "train", 0),
        validation=write_split(folder, "validation", 1),
    )
    PreprocessRecord(dataset=dataset, stats={}).write(workspace)
    (workspace / "recipe.json").write_text(RECIPE.model_dump_json(by_alias=True))
    return workspace


def train_alone(workspace: Path) -> TrainRecord:
    from pipelines.stages import train

    record = train.run(RECIPE, workspace)
    assert record is not None
    return record


def history(workspace: Path) -> list[dict[str, float]]:
    text = (output_folder(workspace, "train") / "history.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_tokens_in_a_model_out(workspace: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    record = train_alone(workspace)
    output = output_folder(workspace, "train")
    assert record == TrainRecord.read(workspace)
    assert (record.steps, record.tokens) == (6, 6 * 6 * 16)
    assert record.model_hash == folder_hash(output / record.model)
    model = AutoModelForCausalLM.from_pretrained(output / record.model)
    assert model.num_parameters() == record.parameters
    assert AutoTokenizer.from_pretrained(output / record.model).eos_token_id == 0
    assert [point["step"] for point in history(workspace)] == [1, 2, 3, 4, 5, 6]
    progress = list(ProgressReader(workspace).read())[-1]
    assert (progress.stage, progress.done, progress.total) == ("train", 6, 6)


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    outputs = []
    for name in ("one", "two"):
        workspace = make_workspace(tmp_path / name)
        train_alone(workspace)
        outputs.append(folder_hash(output_folder(workspace, "train")))
    assert outputs[0] == outputs[1]


def test_a_second_run_goes_on_and_another_recipe_begins_anew(workspace: Path) -> None:
    from pipelines.stages import train

    first = train_alone(workspace)
    assert train_alone(workspace) == first
    other = RECIPE.model_copy(update={"seed": 7})
    again = train.run(other, workspace)
    assert again is not None
    assert again.model_hash != first.model_hash
    assert len(history(workspace)) == 6


def test_training_goes_on_from_a_model(workspace: Path, tmp_path: Path) -> None:
    from pipelines.stages import train

    first = train_alone(workspace)
    start = str(output_folder(workspace, "train") / first.model)
    values = RECIPE.to_dict() | {"model": {"init_from": start}}
    other = make_workspace(tmp_path / "other")
    train.run(Recipe.model_validate(values), other)
    assert history(other)[0]["loss"] < history(workspace)[0]["loss"]


PROCESS = """
from pathlib import Path
from pipelines.core.recipe import Recipe
from pipelines.stages.train import run
recipe = Recipe.model_validate_json(Path("recipe.json").read_text())
run(recipe, Path.cwd())
"""


def test_two_processes_compute_what_one_does(workspace: Path, tmp_path: Path) -> None:
    """As under torchrun; three samples each, so micro-batches of two and of one."""
    alone = make_workspace(tmp_path / "alone")
    one = train_alone(alone)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            cwd=workspace,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    two = TrainRecord.read(workspace)
    assert (two.steps, two.tokens) == (one.steps, one.tokens)
    for ours, theirs in zip(history(workspace), history(alone), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
