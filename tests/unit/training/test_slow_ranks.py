"""Simulated runs: who is slow is known, and must be found in the times of all ranks."""

from dataclasses import dataclass

import numpy as np
import pytest

from pipelines.training.slow_ranks import KEPT, Sample, Slow, SlowRanks
from pipelines.training.stragglers import LEAST, NEW_SLICES
from pipelines.training.work_clock import SLICE

RUNS = 200
STEPS = 80
SAVE_EVERY = 6
PHASES = ("data", "forward and backward", "optimizer", "save")
FACTOR = 1.5
WITHIN = dict.fromkeys(PHASES, 20) | {"save": 5 * SAVE_EVERY}  # steps


@dataclass(frozen=True)
class Found:
    """A verdict of a simulated run."""

    step: int
    phase: str
    slow: Slow


@dataclass(frozen=True)
class Run:
    """A simulated run.

    Attributes:
        truth: The slow rank, its phase, and its first slow step; None if nobody is slow.
        found: The verdicts.
    """

    truth: tuple[int, str, int] | None
    found: list[Found]

    @property
    def right(self) -> list[Found]:
        """The verdicts that name the slow rank and its phase, and soon enough."""
        if self.truth is None:
            return []
        rank, phase, first = self.truth
        return [
            each
            for each in self.found
            if (each.slow.rank, each.phase) == (rank, phase)
            and first < each.step <= first + WITHIN[phase]
        ]


def simulate(seed: int) -> Run:
    """Half of the runs have a slow rank."""
    draw = np.random.default_rng(seed)
    world = int(draw.integers(2, 65))
    stages = int(draw.choice([each for each in (1, 1, 2, 4) if world >= 2 * each]))
    stage = np.arange(world) % stages
    base = np.array([draw.uniform(0.15, 0.4), draw.uniform(0.5, 1), draw.uniform(0.05, 0.2), 1.0])
    base = base * draw.uniform(0.5, 2, (stages, 4))[stage]  # stages differ
    base *= draw.normal(1, 0.03, (world, 4)).clip(0.9, 1.1)  # and so do GPUs, a little
    work = np.ones((world, 4))
    if draw.random() < 0.5:  # the batch can't be divided evenly
        work[:, :2] += (np.arange(world) < world // 3)[:, None] / draw.integers(1, 5)
    noise, jitter = draw.uniform(0.02, 0.1), draw.uniform(0, 0.1)
    log_every = int(draw.choice([1, 2, 5, 10]))
    truth = None
    if seed % 2:
        truth = int(draw.integers(world)), str(draw.choice(PHASES)), int(draw.integers(0, 30))
    compared = [SlowRanks(work[:, each], stage.tolist(), range(world)) for each in range(4)]
    found: list[Found] = []
    slices: list[tuple[int, np.ndarray]] = []
    steps: list[np.ndarray] = []
    save: Sample | None = None
    step_seconds = base[:, :3].sum() / world
    for step in range(STEPS):
        seconds = base * work * np.exp(draw.normal(0, noise, (world, 4)))
        seconds[:, 1] *= np.exp(draw.normal(0, jitter, world))  # samples of different lengths
        if truth and step >= truth[2]:
            seconds[truth[0], PHASES.index(truth[1])] *= FACTOR
        paused = draw.random((world, 3)) < 0.02  # Python's garbage, the system, other programs
        seconds[:, :3] += paused * draw.exponential(1, (world, 3))
        steps.append(seconds[:, :3])
        if (step + 1) % SLICE == 0:
            values = np.median(steps, axis=0)
            values[:, 0] = np.min(steps, axis=0)[:, 0]
            slices.append((step + 1 - SLICE, values))
            steps = []
        if (step + 1) % SAVE_EVERY == 0:
            ended, save = save, Sample(step, seconds[:, 3], 0.0)
            if ended is not None:  # how long it took is known once the next one begins
                compared[3].add(ended)
        if ((step + 1) % SAVE_EVERY and (step + 1) % log_every) or len(slices) < NEW_SLICES:
            continue  # no report, or nothing new
        for first, values in slices[-KEPT:]:
            for column in range(3):
                compared[column].add(
                    Sample(first, values[:, column], LEAST[PHASES[column]] * step_seconds)
                )
        slices = []
        for phase, each in zip(PHASES, compared, strict=True):
            found += [Found(step + 1, phase, slow) for slow in each.news()[0]]
    return Run(truth, found)


def test_who_is_slow_is_named_and_nobody_else() -> None:
    runs = [simulate(seed) for seed in range(RUNS)]
    right = sum(len(run.right) for run in runs)
    named = sum(len(run.found) for run in runs)
    slow = sum(run.truth is not None for run in runs)
    precision, recall = right / named, right / slow
    figures = f"{slow} slow ranks, {named} named, {right} rightly: {precision=:.3f}, {recall=:.3f}"
    assert precision >= 0.95 and recall >= 0.95, figures
    ratios = [each.slow.ratio for run in runs for each in run.right]
    assert np.median(ratios) == pytest.approx(FACTOR, rel=0.05)


def named(
    seconds: list[list[float]], work: list[float], alike: list[int], hosts: str = "abcdefgh"
) -> list[int]:
    """The ranks that are named after the samples."""
    ranks = SlowRanks(work, alike, hosts[: len(work)])
    for step, each in enumerate(seconds):
        ranks.add(Sample(step, np.array(each), 0.0))
    return [each.rank for each in ranks.news()[0]]


def test_who_has_more_to_do_is_not_slow() -> None:
    assert named([[1.0, 1.0, 2.0]] * 3, [1, 1, 2], [0, 0, 0]) == []
    assert named([[1.0, 1.0, 3.0]] * 3, [1, 1, 2], [0, 0, 0]) == [2]


def test_only_ranks_with_the_same_work_are_compared() -> None:
    assert named([[1.0, 1.0, 2.0, 2.0]] * 3, [1] * 4, [0, 0, 1, 1]) == []
    assert named([[1.0, 9.0]] * 3, [1, 1], [0, 1]) == []


def test_ranks_that_share_their_hardware_are_as_fast_as_the_fastest_of_them() -> None:
    assert named([[1.0, 2.0]] * 3, [1, 1], [0, 0], "aa") == []
    assert named([[1.0, 2.0, 1.1, 1.0]] * 3, [1] * 4, [0] * 4, "aabb") == []
    assert named([[1.0, 1.0, 2.0, 1.8]] * 3, [1] * 4, [0] * 4, "aabb") == [2]
    assert named([[1.0, 2.0, 4.0, 2.0]] * 3, [1, 2, 2, 1], [0] * 4, "aabb") == [2]


def test_what_is_not_known_names_nobody() -> None:
    assert named([[np.nan, np.nan, 9.0]] * 3, [1] * 3, [0] * 3) == []
    assert named([[np.nan, 1.0, 9.0]] * 3, [1] * 3, [0] * 3) == [2]


def test_who_recovers_can_be_named_again() -> None:
    ranks = SlowRanks([1, 1], [0, 0], "ab")
    told = []
    for step, ratio in enumerate([2.0] * 4 + [1.0] * 4 + [2.0] * 3):
        ranks.add(Sample(step, np.array([1.0, ratio]), 0.0))
        slow, recovered = ranks.news()
        told += [(step, each.rank, each.since) for each in slow]
        told += [(step, each) for each in recovered]
    assert told == [(2, 1, 0), (7, 1), (10, 1, 8)]
