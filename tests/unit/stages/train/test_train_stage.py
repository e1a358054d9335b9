import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from pipelines.core.errors import UserError
from pipelines.core.storage import folder_hash
from pipelines.data.tokens.token_shards import ShardWriter
from pipelines.recipe.recipe import Recipe
from pipelines.run.progress import ProgressReader
from pipelines.run.records import (
    DatasetRef,
    PreprocessRecord,
    Split,
    TrainRecord,
    output_folder,
)
from tests.forked import exit_codes, start_group

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
            "checkpoint_every": 2,
        },
    }
)


def write_split(folder: Path, name: str, seed: int) -> Split:
    writer = ShardWriter(folder / "tokens" / f"{name}-00000", VOCABULARY)
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, 2000).astype(np.uint16)
    writer.add(ids)
    shard = writer.close().model_copy(update={"path": f"tokens/{name}-00000.bin"})
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
    return workspace


def train_alone(workspace: Path) -> TrainRecord:
    from pipelines.stages.train import train_stage

    record = train_stage.run(RECIPE, workspace)
    assert record is not None
    return record


def history(workspace: Path) -> list[dict[str, Any]]:
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
    from pipelines.stages.train import train_stage

    first = train_alone(workspace)
    assert train_alone(workspace) == first
    other = RECIPE.model_copy(update={"seed": 7})
    again = train_stage.run(other, workspace)
    assert again is not None
    assert again.model_hash != first.model_hash
    assert len(history(workspace)) == 6


def test_training_goes_on_from_a_model(workspace: Path, tmp_path: Path) -> None:
    from pipelines.stages.train import train_stage

    first = train_alone(workspace)
    start = str(output_folder(workspace, "train") / first.model)
    values = RECIPE.to_dict() | {"model": {"init_from": start}}
    other = make_workspace(tmp_path / "other")
    train_stage.run(Recipe.model_validate(values), other)
    assert history(other)[0]["loss"] < history(workspace)[0]["loss"]


def test_a_damaged_shard_ends_the_stage(workspace: Path) -> None:
    from pipelines.stages.train import train_stage

    (output_folder(workspace, "preprocess") / "tokens" / "train-00000.idx").unlink()
    with pytest.raises(UserError, match=r"train-00000\.idx: .* is missing"):
        train_stage.run(RECIPE, workspace)


def cut_after(step: int) -> Callable[[Any], None]:
    """A report that fails after a step, as a machine may."""

    def report(metrics: Any) -> None:
        if metrics.step == step:
            raise InterruptedError

    return report


def test_no_step_is_logged_twice(workspace: Path, mlflow_client: Any, mlflow_run: str) -> None:
    from pipelines.stages.train import train_stage

    (workspace / "run.json").write_text(json.dumps({"mlflow_run_id": mlflow_run}))
    with pytest.raises(InterruptedError):
        train_stage.run(RECIPE, workspace, cut_after(5))  # the last checkpoint is after step 4
    train_stage.run(RECIPE, workspace)
    points = mlflow_client.get_metric_history(mlflow_run, "train/loss")
    assert [point.step for point in points] == [1, 2, 3, 4, 5, 6]
    assert [point.value for point in points] == [point["loss"] for point in history(workspace)]
    tags = mlflow_client.get_run(mlflow_run).data.tags
    assert tags["penstock.reader"] == "mmap"
    assert tags["penstock.mfu_denominator"].startswith("measured ")
    assert tags["penstock.bound_by"].endswith(
        ("% of its roof", "% of a step, idle device included")
    )
    assert [each.path for each in mlflow_client.list_artifacts(mlflow_run, "diagnostics")] == [
        "diagnostics/machine.json"
    ]


def test_a_run_stands_beside_its_plan(workspace: Path, mlflow_client: Any, mlflow_run: str) -> None:
    """What binds it, its speed and its memory, as predicted and as it was."""
    from pipelines.models.presets import preset
    from pipelines.planning.hardware_table import named
    from pipelines.planning.plan import Machine, plan, plan_json
    from pipelines.stages.plan_check import keep_plan
    from pipelines.stages.train import train_stage

    recipe = Recipe.model_validate(RECIPE.to_dict() | {"data": {"sequence_length": 64}})
    shape = preset(recipe.model.preset).sized(VOCABULARY, 64)
    planned = plan_json(plan(recipe, shape, Machine(named("cpu"), 1, price=0.0)))
    keep_plan(workspace, planned)
    (workspace / "run.json").write_text(json.dumps({"mlflow_run_id": mlflow_run}))
    train_stage.run(recipe, workspace)
    run = mlflow_client.get_run(mlflow_run).data
    reported = run.tags["penstock.bound_by"].split()[0]
    predicted = run.tags["penstock.bound_by_predicted"].partition(" for ")[0]
    assert predicted == planned["bound_by"]
    assert run.metrics["plan/bound_by_hit"] == float(reported in (predicted.split()[0], "host"))
    assert run.metrics["plan/tokens_per_second_measured"] > 0
    assert abs(run.metrics["plan/memory_gib_error"]) < 0.15


def run_and_record(workspace: Path, report: Callable[[Any], None] | None = None) -> None:
    """Run the stage and append `[step, sample ids]` of each step to a file of this process."""
    from pipelines.loading.dataloader import TokenLoader
    from pipelines.stages.train import train_stage

    path = workspace / f"samples-{os.environ.get('RANK', '0')}.jsonl"
    share = TokenLoader._share

    def recorded(loader: TokenLoader, step: int) -> Any:
        indices = share(loader, step)
        with path.open("a") as file:
            file.write(json.dumps([step, indices.tolist()]) + "\n")
        return indices

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenLoader, "_share", recorded)
        train_stage.run(RECIPE, workspace, report)


def one_of_two(*runs: tuple[Path, int]) -> None:
    """As under torchrun: trains in each workspace, cut after a step; a user's error is kept."""
    dist.init_process_group("gloo")
    for workspace, step in runs:
        try:
            run_and_record(workspace, cut_after(step))
        except InterruptedError:
            pass
        except UserError as error:
            (workspace / f"error-{dist.get_rank()}").write_text(str(error))
            sys.exit(2)


def samples_of_each_step(workspace: Path, ranks: int) -> dict[int, list[int]]:
    """Over all processes in their order; of a step done twice, the second time."""
    of_rank = [
        dict(map(json.loads, (workspace / f"samples-{rank}.jsonl").read_text().splitlines()))
        for rank in range(ranks)
    ]
    return {step: [sample for of in of_rank for sample in of[step]] for step in of_rank[0]}


NEVER = RECIPE.train.steps + 1


def test_two_processes_go_on_as_two_or_as_one(tmp_path: Path) -> None:
    """Three samples a process, so micro-batches of two and of one."""
    names = ("alone", "whole", "cut and two", "cut and one")
    alone, whole, two, one = (make_workspace(tmp_path / name) for name in names)
    runs = (whole, NEVER), (two, 5), (two, NEVER), (one, 5)
    assert exit_codes(start_group(one_of_two, runs, runs)) == [0, 0]
    # Each process's own file then has the steps that it did; the checkpoint was after step 4.
    (one / "samples-0.jsonl").rename(one / "samples of two")
    for workspace in (alone, one):
        run_and_record(workspace)

    assert TrainRecord.read(two) == TrainRecord.read(whole)
    assert history(two) == history(whole)
    assert samples_of_each_step(two, ranks=2) == samples_of_each_step(whole, ranks=2)

    expected = samples_of_each_step(whole, ranks=2)
    assert samples_of_each_step(alone, ranks=1) == expected
    assert samples_of_each_step(one, ranks=1) == {step: expected[step] for step in (4, 5)}
    for workspace in (alone, one):
        for ours, theirs in zip(history(workspace), history(whole), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            assert ours["samples"] == theirs["samples"]


def test_an_error_of_one_process_ends_both_with_its_line(tmp_path: Path) -> None:
    good, bad = make_workspace(tmp_path / "good"), make_workspace(tmp_path / "bad")
    (output_folder(bad, "preprocess") / "tokens" / "train-00000.bin").unlink()
    group = start_group(one_of_two, ((good, NEVER),), ((bad, NEVER),))
    assert exit_codes(group) == [2, 2]
    for rank, workspace in enumerate((good, bad)):
        error = (workspace / f"error-{rank}").read_text()
        assert error.startswith(f"{bad}")
        assert "train-00000.bin: a token shard's file is missing" in error
