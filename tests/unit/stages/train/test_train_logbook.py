"""What each try of a training leaves in its logbook."""

from pathlib import Path

import pytest

from pipelines.run.logbook import Entry, read_logbook
from pipelines.run.progress import PROGRESS_FILE, ProgressWriter
from pipelines.stages.train import train_logbook
from pipelines.stages.train.train_logbook import TrainLogbook, out_of_memory

TWO = {"parallel.dp_replicate": 2, "parallel.tp": 1, "parallel.sharding": "none"}
ONE = TWO | {"parallel.dp_replicate": 1}


def a_try(workspace: Path, layout: train_logbook.Facts, before: train_logbook.Facts | None = None):
    """A process of its own, as far as the logbook knows."""
    logbook = TrainLogbook(workspace, layout, before, steps=100)
    logbook._life += f", try {len(read_logbook(workspace))}"
    return logbook


def entries(workspace: Path) -> list[Entry]:
    return read_logbook(workspace)


def test_the_first_try_starts_and_the_next_ones_resume(tmp_path: Path) -> None:
    a_try(tmp_path, TWO).begin_training(0)
    progress = ProgressWriter(tmp_path, "train", interval=0)
    progress.write(10, 100, "steps")
    progress.write(60, 100, "steps")
    with (tmp_path / PROGRESS_FILE).open("a") as file:
        file.write('{"stage": "train", "done": 65, "unit": "steps", "rate": 2}\n')
    second = a_try(tmp_path, TWO, TWO)
    second.begin_training(50)
    second.begin_training(50)  # told again, it is the same event
    start, resume = entries(tmp_path)
    assert (start.kind, start.step, start.done) == ("start", 0, "trains on 2 workers")
    assert (resume.kind, resume.step) == ("resume", 50)
    assert resume.done == "training goes on after step 50 of 100 on 2 workers"
    assert resume.worker_hours_lost == pytest.approx(15 / 2 * 2 / 3600)


def test_other_workers_and_another_layout_are_told_apart(tmp_path: Path) -> None:
    a_try(tmp_path, TWO).begin_training(0)
    a_try(tmp_path, ONE, TWO).begin_training(10)
    a_try(tmp_path, TWO, ONE).begin_training(20)
    sharded = TWO | {"parallel.sharding": "full"}
    a_try(tmp_path, sharded, TWO).begin_training(30)
    told = [(each.kind, each.cause, each.done) for each in entries(tmp_path)]
    assert [each for each in told if each[0] not in ("start", "resume")] == [
        ("workers changed", "2 → 1 workers", "parallel.dp_replicate: 2 → 1"),
        ("workers changed", "1 → 2 workers", "parallel.dp_replicate: 1 → 2"),
        ("layout change", "the layout has changed", "parallel.sharding: none → full"),
    ]


def test_what_an_earlier_version_did_not_note_has_not_changed(tmp_path: Path) -> None:
    a_try(tmp_path, ONE).begin_training(0)
    a_try(tmp_path, ONE | {"train.precision": "fp32"}, ONE).begin_training(10)
    assert [each.kind for each in entries(tmp_path)] == ["start", "resume"]


def test_what_a_run_loses_counts_for_every_worker(tmp_path: Path) -> None:
    logbook = a_try(tmp_path, TWO)
    for _ in range(2):
        logbook.note("rollback", "rollback 1 at step 8", "why", "what", step=8, seconds_lost=1800)
    (entry,) = entries(tmp_path)
    assert entry.worker_hours_lost == 1.0


def test_memory_that_runs_out_on_all_is_one_event(tmp_path: Path) -> None:
    for _ in range(2):
        out_of_memory(tmp_path, "dp(2)", "the next try takes less")
    out_of_memory(tmp_path, "dp(2) and less", "the next try takes less")
    assert [each.cause for each in entries(tmp_path)] == [
        "out of memory with dp(2)",
        "out of memory with dp(2) and less",
    ]


def test_a_try_that_ended_too_soon_to_be_timed_lost_nothing_that_it_saved(tmp_path: Path) -> None:
    a_try(tmp_path, TWO).begin_training(0)
    progress = tmp_path / PROGRESS_FILE
    progress.write_text('{"stage": "train", "done": 38, "unit": "steps", "rate": null}\n')
    for step in (38, 30):
        a_try(tmp_path, TWO, TWO).begin_training(step)
    assert [entry.worker_hours_lost for entry in entries(tmp_path)[1:]] == [0.0, None]
