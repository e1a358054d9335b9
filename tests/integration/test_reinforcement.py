"""A model learns from rewards by the real stage; one that only pleases its rewards is noticed."""

from pathlib import Path

import pytest

from pipelines.reinforcement import rewards
from pipelines.run.logbook import read_logbook
from pipelines.stages.train import train_stage
from pipelines.training.metrics import StepMetrics
from tests.arithmetic import make_guesser, prepared, reinforced


@pytest.fixture(scope="module")
def guesser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_guesser(tmp_path_factory.mktemp("guesser"))


@pytest.mark.parity
@pytest.mark.timeout(600)
def test_sums_rise_from_a_fifth_to_nine_tenths_in_ten_minutes(
    guesser: Path, tmp_path: Path
) -> None:
    points: list[StepMetrics] = []

    def report(point: StepMetrics) -> None:
        points.append(point)
        if point.further["reward"] >= 0.9:
            raise InterruptedError

    asked = reinforced(tmp_path, guesser, "train.steps=600")
    with pytest.raises(InterruptedError):
        train_stage.run(*prepared(tmp_path / "run", asked), report)
    assert points[0].further["reward"] <= 0.2
    assert max(point.further["sampler_mismatch"] for point in points) < 1e-5


def test_a_model_that_pleases_its_rewards_only_raises_alarms(
    guesser: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward with a hole: it counts the answer's letters."""

    def many(prompt: str, answer: str, wanted: str) -> float:
        del prompt, wanted
        return len(answer) / 16

    monkeypatch.setattr(rewards, "load", lambda *_: many)
    asked = reinforced(
        tmp_path,
        guesser,
        "train.steps=12",
        "train.log_every=2",
        "train.lr=2e-3",
        "reinforcement.max_tokens=7",
        "reinforcement.kl=0",
        "reinforcement.max_drift=1",
        "reinforcement.max_watched_loss=0.05",
        "reinforcement.rewards=[{name: many}, {name: exact_match, weight: 0}]",
    )
    points: list[StepMetrics] = []
    record = train_stage.run(*prepared(tmp_path / "run", asked), points.append)
    assert points[-1].further["reward"] > 2 * points[0].further["reward"]
    assert record is not None
    told = " ".join(record.alarms)
    assert "nats a token from the one that training started from" in told
    assert "tokens, and had" in told
    assert "but the watched exact_match fell from" in told
    noted = [entry for entry in read_logbook(tmp_path / "run") if entry.kind == "alarm"]
    assert len(noted) == len(record.alarms) == 3
