"""The register task between its two halves: what it asks, and what it makes of the answer."""

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import TaskAwaitingInput
from airflow.sdk.execution_time.context import OutletEventAccessors

from pipelines.core.storage import write_json, write_text
from pipelines.orchestration.approval import PROMOTED, RegisterOperator
from pipelines.recipe.recipe_files import dump_yaml, load_recipe
from pipelines.run.logbook import read_logbook
from pipelines.run.records import (
    EvaluateRecord,
    ModelRef,
    RegisterRecord,
    TrainRecord,
)
from pipelines.run.verdict import Verdict
from pipelines.stages.register.answer import Answer

CHAMPION, CANDIDATE = ModelRef(name="m", version=3), ModelRef(name="m", version=4)


class Task(RegisterOperator):
    """The stage itself is a verdict that the test gives."""

    verdicts: list[str]

    def run_stage(self, workspace):
        verdict = Verdict(
            decision=self.verdicts.pop(0),
            reason="better on 8 of the same 9 documents",
            candidate_bits_per_byte=2.1,
            champion_bits_per_byte=2.25,
        )
        RegisterRecord(verdict=verdict, model=CHAMPION, candidate=CANDIDATE).write(workspace)
        self.answers.append(Answer.read(workspace))
        return False


@pytest.fixture
def workspace(tmp_path):
    facts = {"dag_run_id": "r", "git_commit": "c0ffee" * 6, "dirty": True}
    write_json(tmp_path / "run.json", facts | {"recipe_fingerprint": "f1"})
    overrides = ["register.needs_approval=true", "register.approval_hours=48"]
    write_text(tmp_path / "params.yaml", dump_yaml(load_recipe("debug", overrides)))
    TrainRecord(
        model="model", model_hash="h", parameters=12345, steps=7, tokens=640, metrics={}
    ).write(tmp_path)
    EvaluateRecord(
        bits_per_byte=2.1,
        perplexity=8.5,
        documents=9,
        bytes=900,
        data_hash="d",
        baselines={"xz": 1.5},
        samples=(),
    ).write(tmp_path)
    return tmp_path


@pytest.fixture
def make(workspace):
    """A new operator for the same task instance, as each process of Airflow has."""

    def one(*verdicts):
        task = Task(task_id="register", workspace=str(workspace))
        task.verdicts, task.answers = list(verdicts), []
        return task

    return one


@pytest.fixture
def context():
    ti = SimpleNamespace(try_number=1, id="u", task_id="register", map_index=None)
    return {"ti": ti, "task_instance": None, "outlet_events": OutletEventAccessors()}


def announced(context):
    """The events of the task, which Airflow sends when the task has succeeded."""
    events = context["outlet_events"][PROMOTED].asset_alias_events
    return [(event.dest_asset_key.name, event.extra) for event in events]


def answered(option, user):
    return {
        "chosen_options": [option],
        "params_input": {},
        "responded_at": datetime(2026, 1, 1, tzinfo=UTC),
        "responded_by_user": {"id": user, "name": user} if user else None,
        "timedout": user is None,
    }


def test_without_the_option_nobody_is_asked(make, context):
    assert make("promoted").execute(context) == {"stage": "register", "cached": False}
    assert announced(context) == [("model/m@champion", {"version": CHAMPION.version})]


@pytest.mark.parametrize("decision", ["refused", "unchanged"])
def test_a_champion_that_stays_is_no_event(make, context, decision):
    make(decision).execute(context)
    assert announced(context) == []


def test_the_question_is_put_with_the_comparison_and_a_time_limit(make, context, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "airflow.providers.standard.operators.hitl.upsert_hitl_detail",
        lambda **question: asked.append(question),
    )
    context["task_instance"] = context["ti"]
    with pytest.raises(TaskAwaitingInput) as parked:
        make("needs approval").execute(context)
    assert parked.value.timeout.total_seconds() == 48 * 3600
    (question,) = asked
    assert question["subject"] == "Should m version 4 become the champion?"
    assert question["defaults"] == ["Reject"]
    for part in ("**2.1000** | 2.2500", "8 of the same 9", "12,345", "uncommitted", "48 hours"):
        assert part in question["body"]


@pytest.mark.parametrize(
    ("option", "user", "approved", "words"),
    [
        ("Approve", "ada", True, "approved by ada"),
        ("Reject", "ada", False, "refused by ada"),
        ("Reject", None, False, "refused because nobody answered in time"),
    ],
)
def test_the_answer_is_kept_until_the_stage_has_ended_with_it(
    make, context, workspace, option, user, approved, words
):
    make("needs approval").run_stage(workspace)
    task = make("promoted" if approved else "refused")
    task.execute_complete(context, answered(option, user))
    (answer,) = task.answers
    assert (answer.approved, answer.by, answer.words) == (approved, user, words)
    assert (answer.candidate, answer.champion) == (4, 3)
    (entry,) = read_logbook(workspace)
    assert (entry.kind, entry.key) == ("human decision", "answer to try 1 of register")
    assert words in entry.cause
    assert len(announced(context)) == approved
    assert Answer.read(workspace) is None  # a user's Clear asks anew


def test_a_try_that_fails_behind_the_answer_is_followed_by_one_that_has_it(
    make, context, workspace, monkeypatch
):
    make("needs approval").run_stage(workspace)
    failing = make("promoted")

    def away(*_):
        raise OSError("the disk is away")

    monkeypatch.setattr("pipelines.orchestration.approval.forget_answer", away)
    with pytest.raises(OSError, match="away"):
        failing.execute_complete(context, answered("Approve", "ada"))
    monkeypatch.undo()
    again = make("promoted")
    again.execute(context)
    assert again.answers[0].approved


def test_a_champion_that_changed_meanwhile_means_another_question(make, context, workspace):
    make("needs approval").run_stage(workspace)
    with pytest.raises(RuntimeError, match="the question is asked again"):
        make("needs approval").execute_complete(context, answered("Approve", "ada"))
