"""A retry finds its job again, a Clear does not."""

import pytest

from pipelines.orchestration.job_state import JobState


@pytest.fixture
def state(tmp_path):
    return JobState.of(tmp_path, "train", -1)


def test_a_retry_stays_in_its_generation(state):
    state.begin(max_tries=3)
    state.update(state.read(), submissions=("penstock-a-0",), n=2)
    again = state.begin(max_tries=3)
    assert (again.generation, again.n, again.former) == (0, 2, None)


def test_a_clear_which_raises_max_tries_begins_the_next(state):
    state.begin(max_tries=3)
    state.update(state.read(), submissions=("penstock-a-0",), best={"steps": 9}, n=2)
    cleared = state.begin(max_tries=4)
    assert (cleared.generation, cleared.n, cleared.best) == (1, 0, {})
    assert cleared.former == "penstock-a-0"
    assert state.begin(max_tries=4) == cleared  # until somebody knows that the job is over


def test_a_task_without_a_job_has_nothing_to_leave_behind(state):
    state.begin(max_tries=3)
    assert state.begin(max_tries=4).generation == 0


def test_a_closed_generation_is_followed_by_the_next(state):
    state.begin(max_tries=3)
    state.update(state.read(), submissions=("penstock-a-0",))
    state.close("penstock-a-0")
    assert state.begin(max_tries=3).generation == 1


def test_a_late_close_does_not_hit_the_job_that_follows(state):
    state.begin(max_tries=3)
    state.update(state.read(), submissions=("penstock-a-0", "penstock-b-0"))
    state.close("penstock-a-0")
    assert not state.read().closed


def test_a_late_close_does_not_hit_the_generation_that_has_begun(state):
    # Who stopped the job says so after the cleared task began, and before it has submitted its own.
    state.begin(max_tries=3)
    state.update(state.read(), submissions=("penstock-a-0",))
    state.begin(max_tries=4)
    state.update(state.read(), former_over=True)
    state.close("penstock-a-0")
    state.update(state.read(), submissions=("penstock-a-0", "penstock-b-0"))
    assert state.begin(max_tries=4).generation == 1


def test_closing_in_a_workspace_that_is_gone_makes_none(state):
    state.close("penstock-a-0")
    assert not state.path.parent.exists()


def test_a_mapped_task_has_its_own_file(tmp_path):
    assert JobState.of(tmp_path, "train", 2).path.name == "train-2.json"
