"""The sweep's DAG, and what its operators make of the form."""

import runpy
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowFailException

from pipelines.core.settings import GPU_POOL, PROJECT
from pipelines.core.storage import write_json, write_text
from pipelines.orchestration.naming import members, workspace_name
from pipelines.orchestration.sweep import BestOperator, MemberOperator, PlanOperator
from pipelines.recipe.recipe_files import dump_yaml, load_recipe
from pipelines.run.records import EvaluateRecord


@pytest.fixture(scope="module")
def dag():
    return runpy.run_path(str(PROJECT / "dags/llm_sweep.py"))["register"].dag


@pytest.fixture
def sweep(home, tmp_path):
    (tmp_path / "text.txt").write_text("some text\n")
    files = ("data.source.kind=files", f"data.source.path={tmp_path / 'text.txt'}")
    workspace = home / "runs" / workspace_name("llm_sweep", "s1")
    facts = {"dag_run_id": workspace.name, "git_commit": "c0ffee", "dirty": False}
    write_json(workspace / "run.json", facts | {"recipe_fingerprint": "f"})
    write_text(workspace / "params.yaml", dump_yaml(load_recipe("debug", files)))
    write_json(workspace / "source.json", {})
    return workspace


def context(text):
    return {"dag_run": SimpleNamespace(conf={"sweep": text}), "params": {}}


def plan(workspace, text):
    return PlanOperator(task_id="plan", workspace=str(workspace)).execute(context(text))


def test_each_members_stages_are_the_pipelines_and_compute_in_the_pool(dag):
    mapped = {task.task_id: task for task in dag.tasks if task.task_id.startswith("member.")}
    assert list(mapped) == [
        f"member.{name}" for name in ("prepare", "preprocess", "validate", "train", "evaluate")
    ]
    pools = {task_id for task_id, task in mapped.items() if task.pool == GPU_POOL}
    assert pools == {"member.train", "member.evaluate"}
    assert mapped["member.train"].stage == "train"
    assert mapped["member.train"].entrypoint == "python -m ray_jobs.stage_job train"


def test_one_member_a_line_and_none_twice(sweep):
    text = "train.lr=1e-3\n\n train.lr=3e-3; train.steps=7 \ntrain.lr=1e-3\n"
    assert plan(sweep, text) == ["train.lr=1e-3", "train.lr=3e-3; train.steps=7"]
    assert members(sweep) == []  # none has begun


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train.stepz=3", "did you mean train.steps"),
        ("\n \n", "no member"),
        ("train.lr=1\ntrain.checkpoints=/dev/null/there", "cannot be written"),
        ("data.pii.phone_region=XX", "no country has this code"),
    ],
)
def test_a_wrong_member_fails_before_anything_is_run(sweep, text, line):
    with pytest.raises(AirflowFailException, match=line):
        plan(sweep, text)


def test_a_member_is_checked_again_when_it_begins(sweep):
    plan(sweep, "train.lr=1")
    member = MemberOperator(
        task_id="prepare",
        overrides="train.checkpoints=/dev/null/there",
        workspace=str(sweep),
    )
    begins = {"ti": SimpleNamespace(map_index=0)}
    with pytest.raises(AirflowFailException, match=r"train\.checkpoints: .* cannot be written"):
        member.execute(begins)


def test_the_best_is_the_one_with_the_fewest_bits_of_those_that_got_there(sweep):
    plan(sweep, "train.lr=1\ntrain.lr=2\ntrain.lr=3")
    for index, bits in ((0, 2.5), (2, 2.25)):  # member 1 failed
        workspace = sweep.parent / f"{sweep.name}.{index}"
        facts = {"dag_run_id": workspace.name, "git_commit": "c0ffee", "dirty": False}
        write_json(workspace / "run.json", facts | {"recipe_fingerprint": "f"})
        EvaluateRecord(
            bits_per_byte=bits,
            perplexity=9.0,
            documents=1,
            bytes=1,
            data_hash="d",
            baselines={},
            samples=(),
        ).write(workspace)
    best = BestOperator(task_id="best", workspace=str(sweep)).execute({})
    assert best == str(sweep.parent / f"{sweep.name}.2")


def test_a_sweep_of_which_no_member_was_evaluated_fails(sweep):
    plan(sweep, "train.lr=1")
    with pytest.raises(RuntimeError, match="no member"):
        BestOperator(task_id="best", workspace=str(sweep)).execute({})
