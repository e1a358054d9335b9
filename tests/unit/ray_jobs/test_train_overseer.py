"""How many failures are forgiven, and which are a shortage of memory."""

from pathlib import Path

import pytest
import torch
from ray.exceptions import ActorDiedError, OutOfMemoryError, WorkerCrashedError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from pipelines.recipe.recipe_files import load_recipe
from pipelines.training.checkpoint.store import CheckpointStore, Start
from ray_jobs.train_overseer import (
    FRUITLESS,
    FruitlessError,
    HostOutOfMemoryError,
    Progress,
    _answers,
    is_out_of_memory,
    shortage_of,
)


def save(workspace: Path, step: int) -> None:
    """A complete checkpoint, as far as its place shows."""
    folder = workspace / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    CheckpointStore(workspace / "checkpoints").complete(step, {})


def test_a_run_that_gets_on_may_fail_without_end(tmp_path: Path) -> None:
    progress = Progress(load_recipe("debug"), tmp_path)
    for step in range(1, 20):
        progress.failed("a worker died")
        progress.failed("a worker died")
        save(tmp_path, step)


def test_a_run_gets_on_by_copies_in_memory_too(tmp_path: Path) -> None:
    progress = Progress(load_recipe("debug"), tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in range(1, 20):
        progress.failed("a machine is lost")
        progress.failed("a machine is lost")
        store.begin(Start(name=f"{step}", step=step, after=f"{step - 1}"))
    for _ in range(FRUITLESS - 1):
        progress.failed("the same again")
    with pytest.raises(FruitlessError):
        progress.failed("the same again")


def test_one_that_does_not_is_given_up(tmp_path: Path) -> None:
    save(tmp_path, 7)
    progress = Progress(load_recipe("debug"), tmp_path)
    for _ in range(FRUITLESS - 1):
        progress.failed("a worker died")
    torn = tmp_path / "checkpoints" / "step-000009"
    torn.mkdir()
    line = "3 failures without a new checkpoint since step 7; the last: the same again"
    with pytest.raises(FruitlessError, match=line):
        progress.failed("the same again")


def test_a_node_that_refuses_or_is_not_there_does_not_answer() -> None:
    assert not _answers("127.0.0.1", 9)


# What Ray 2.60 says; a page about policies and the largest processes follows.
RAN_LOW = (
    "7 worker(s) were killed due to the node running low on memory.\nMemory on the node (IP: "
    "192.0.2.2, ID: a1c3a583ba91) was 9.45GB used / 23.54GB limit (0.401224)\nOOM kill reason: "
    "Memory usage 10026336256B exceeded threshold of 10024666112B"
)


def refused_by_the_host() -> Exception:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**55, dtype=torch.uint8)
    return refused.value


def health_check(failure: Exception) -> WorkerHealthCheckFailedError:
    """As Ray Train's controller wraps it."""
    return WorkerHealthCheckFailedError("A worker health check failed.", failure)


@pytest.mark.parametrize(
    "error",
    [
        health_check(OutOfMemoryError(RAN_LOW)),
        OutOfMemoryError(RAN_LOW),
        MemoryError(),
        refused_by_the_host(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_shortage_of_memory_is_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [health_check(ActorDiedError()), WorkerCrashedError(), RuntimeError("a bug")],
    ids=lambda error: type(error).__name__,
)
def test_another_death_is_no_shortage(error: Exception) -> None:
    """Ray's text for any death names the kernel's killer among the causes that there may be."""
    assert not is_out_of_memory(error)


def test_a_shortage_is_told_in_a_line() -> None:
    line = "192.0.2.2 had 9.45GB of 23.54GB in use, and Ray ended workers"
    assert shortage_of(health_check(OutOfMemoryError(RAN_LOW))) == line
    assert shortage_of(HostOutOfMemoryError(line)) == line
