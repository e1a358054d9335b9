import pytest

from pipelines.recipe.training_section import Train
from pipelines.training.schedule import Schedule


def test_the_rate_warms_up_and_then_follows_a_cosine() -> None:
    train = Train(steps=110, warmup_steps=10, lr=1.0, min_lr_ratio=0.2)
    rates = [Schedule(train).rate(step) for step in range(111)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.6)
    assert rates[110] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_no_warm_up_begins_at_the_peak() -> None:
    assert Schedule(Train(steps=1, warmup_steps=0, lr=0.5)).rate(0) == 0.5


def test_wsd_stays_for_half_of_the_steps_and_then_falls_in_a_line() -> None:
    train = Train(steps=100, warmup_steps=10, lr=1.0, min_lr_ratio=0.2, lr_schedule="wsd")
    rates = [Schedule(train).rate(step) for step in range(101)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:51] == [1.0] * 41
    assert rates[75] == pytest.approx(0.6)
    assert rates[100] == pytest.approx(0.2)


def wsd(**train: float) -> Schedule:
    return Schedule(Train.model_validate({"lr_schedule": "wsd", "lr": 1.0} | train))


def test_half_of_the_time_decides_how_many_steps_there_will_be() -> None:
    schedule = wsd(steps=1000, max_seconds=60)
    before = [schedule.rate(step) for step in range(200)]
    assert schedule.end_by_clock(199, 29.9) is None
    assert schedule.end_by_clock(200, 30.0) == 400
    schedule.end_after(400)
    assert [schedule.rate(step) for step in range(200)] == before
    assert schedule.rate(200) == 1.0
    assert schedule.rate(300) == pytest.approx(0.55)
    assert schedule.end_by_clock(300, 90.0) is None  # decided once, so a slow moment cuts nothing


def test_the_clock_adds_no_steps() -> None:
    assert wsd(steps=300, max_seconds=60).end_by_clock(200, 30.0) == 300


def test_a_cosine_is_cut_when_the_time_is_over() -> None:
    schedule = Schedule(Train(steps=1000, max_seconds=60))
    assert schedule.end_by_clock(200, 59.9) is None
    assert schedule.end_by_clock(201, 60.0) == 201


def test_a_repeated_run_ends_after_the_given_step_with_the_rates_of_the_first() -> None:
    first, again = (
        wsd(steps=1000, max_seconds=60),
        Schedule(Train(steps=1000, lr_schedule="wsd", lr=1.0), last_step=400),
    )
    first.end_after(400)
    assert again.last_step == 400
    assert [first.rate(step) for step in range(400)] == [again.rate(step) for step in range(400)]
    assert again.end_by_clock(200, 1e9) is None


@pytest.mark.parametrize(("kind", "goes_on"), [("wsd", False), ("cosine", True)])
def test_a_resumed_run_knows_what_the_clock_chose(kind: str, *, goes_on: bool) -> None:
    train = Train.model_validate({"steps": 1000, "max_seconds": 60, "lr_schedule": kind})
    first, resumed = Schedule(train), Schedule(train)
    first.end_after(400)
    resumed.load_state_dict(first.state_dict())
    assert (resumed.last_step == 1000) == goes_on  # a cosine that was cut takes a longer limit
