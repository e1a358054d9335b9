"""The deadline of a run, and the notice of one that is late."""

import asyncio

import pytest

from pipelines.core.errors import UserError
from pipelines.orchestration import deadline as module
from pipelines.orchestration.deadline import VARIABLE, deadline


def test_a_late_run_is_posted_as_the_deadline_says(monkeypatch):
    posted = []
    monkeypatch.setattr(module, "post", posted.append)
    monkeypatch.setenv(VARIABLE, "36")
    alert = deadline()
    assert alert.interval.total_seconds() == 36 * 3600
    run = {"dag_id": "llm_pipeline", "dag_run_id": "r1"}  # as Airflow gives it to the callback
    asyncio.run(module.post_late(**alert.callback.kwargs, context={"dag_run": run}))
    (notice,) = posted
    assert (notice.event, notice.run, notice.error) == ("late", "r1", "not over after 36 hours")


def test_no_deadline_is_the_default_and_a_wrong_one_is_one_line(monkeypatch):
    assert deadline() is None
    monkeypatch.setenv(VARIABLE, "soon")
    with pytest.raises(UserError, match="'soon' is not a number of hours"):
        deadline()
