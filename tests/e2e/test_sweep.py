"""A sweep whose best member awaits a user, through the real Airflow, Ray, MLflow and Chromium."""

import time
from datetime import datetime

import pytest

from pipelines.orchestration.naming import member_workspace, workspace_name
from pipelines.platform.airflow_api import AirflowApi
from pipelines.platform.supervisor import GROUP, Supervisor
from pipelines.recipe.recipe_files import RESOLVED, load_recipe
from pipelines.run.logbook import read_logbook
from pipelines.run.records import RegisterRecord
from pipelines.run.workspace import Run, workspace_path
from tests.e2e.airflow_runs import DagRun, wait_for

MODEL = "penstock-swept"
PRICE = 3600.0  # a CPU second costs 1
MEMBERS = ("train.lr=3e-3", "train.lr=1e-7")  # the second learns nothing

# By hand: an answer after the Clear of a waiting task has been seen to take no effect.
pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def sweep(platform, webhook):
    """The sweep's DAG run, which has put its question."""
    run = DagRun(AirflowApi(platform.settings), "llm_sweep", "first")
    overrides = [
        f"register.model_name={MODEL}",
        "register.needs_approval=true",
        f"resources.price_per_cpu_hour={PRICE}",
    ]
    recipe = load_recipe("debug", overrides)
    run.start({RESOLVED: recipe.to_dict(), "sweep": "\n".join(MEMBERS)})
    run.wait_for_task("register", "awaiting_input")
    return run


@pytest.fixture(scope="module")
def workspace(platform, sweep):
    return workspace_path(platform.settings.runs, workspace_name(sweep.dag_id, sweep.run_id))


@pytest.fixture
def mlflow(platform_variables):
    from pipelines.tracking.mlflow_client import open_client

    return open_client()


def mlflow_run(mlflow, workspace):
    return mlflow.get_run(Run.read(workspace).mlflow_run_id)


def statuses(mlflow, workspace):
    folders = [workspace, *(member_workspace(workspace, index) for index in (0, 1))]
    return [mlflow_run(mlflow, folder).info.status for folder in folders]


def test_each_member_is_a_run_of_its_own_below_the_sweeps(sweep, workspace, mlflow):
    parent = mlflow_run(mlflow, workspace)
    members = [mlflow_run(mlflow, member_workspace(workspace, index)) for index in (0, 1)]
    assert {run.data.tags["mlflow.parentRunId"] for run in members} == {parent.info.run_id}
    assert tuple(run.data.tags["penstock.overrides"] for run in members) == MEMBERS
    assert [run.data.params["train.lr"] for run in members] == ["0.003", "1e-07"]
    bits = [run.data.metrics["bits_per_byte"] for run in members]
    assert bits[0] < bits[1]
    assert parent.data.tags["penstock.best_run"] == members[0].info.run_id


def test_members_queue_for_the_pool(sweep):
    of_train = [task for task in sweep.tasks() if task["task_id"] == "member.train"]
    assert {task["pool"] for task in of_train} == {"gpu_jobs"}
    (_, ended), (began, _) = sorted(
        tuple(datetime.fromisoformat(task[key]) for key in ("start_date", "end_date"))
        for task in of_train
    )
    assert ended <= began  # one job has room on two processors


def test_what_each_stage_cost_is_written_once(workspace, mlflow):
    run = mlflow_run(mlflow, member_workspace(workspace, 0))
    metrics = run.data.metrics
    for stage in ("preprocess", "validate"):  # the sweep's own, out of the cache
        assert metrics[f"seconds/{stage}"] == metrics[f"cost/{stage}"] == 0
    assert metrics["seconds/train"] > 0
    assert metrics["gpu_hours/train"] == 0
    assert metrics["cost/train"] == pytest.approx(metrics["worker_hours/train"] * PRICE)
    assert metrics["seconds/train"] < metrics["cost/train"] <= 2 * metrics["seconds/train"]
    for key in metrics:
        if key.startswith(("seconds/", "cost/", "worker_hours/", "gpu_hours/")):
            assert len(mlflow.get_metric_history(run.info.run_id, key)) == 1, key


def test_the_question_shows_the_comparison(sweep, page, platform, picture):
    question = sweep.question("register")
    assert question["subject"] == f"Should {MODEL} version 1 become the champion?"
    assert question["defaults"] == ["Reject"]
    page.goto(required_actions(platform, sweep))
    page.get_by_text("bits per byte of held-out text").wait_for()
    page.get_by_role("link", name="MLflow run").first.wait_for()
    page.get_by_role("button", name="Approve").wait_for()
    picture("approval")


def test_a_run_marked_as_failed_closes_its_mlflow_runs_and_a_clear_opens_them(
    sweep, workspace, mlflow, webhook
):
    assert statuses(mlflow, workspace) == ["RUNNING"] * 3
    before = len(webhook)
    sweep.mark("failed")
    wait_for(lambda: statuses(mlflow, workspace) == ["FAILED"] * 3, "closed", 60)
    wait_for(lambda: len(webhook) > before, "posted", 60)
    time.sleep(2)
    (notice,) = webhook[before:]
    assert (notice["dag"], notice["run"], notice["task"]) == ("llm_sweep", "first", "register")
    assert notice["error"] == "marked as failed by a user"
    sweep.clear()
    sweep.wait_for_task("register", "awaiting_input")
    wait_for(lambda: statuses(mlflow, workspace) == ["RUNNING"] * 3, "open again", 60)


def test_a_refusal_leaves_the_version_without_the_alias(sweep, workspace, mlflow):
    sweep.answer("register", "Reject")
    sweep.wait_for_task("register", "success")
    best = member_workspace(workspace, 0)
    record = RegisterRecord.read(best)
    assert (record.verdict.decision, record.model) == ("refused", None)
    assert record.verdict.reason.startswith("refused by admin; the first model")
    (version,) = mlflow.search_model_versions(f"name = '{MODEL}'")
    assert version.tags["penstock.verdict"] == "refused"
    assert not mlflow.get_registered_model(MODEL).aliases
    wait_for(lambda: statuses(mlflow, workspace) == ["FINISHED"] * 3, "closed", 60)
    sweep.clear("register")
    sweep.wait_for_task("register", "awaiting_input")


def test_approval_in_the_browser_promotes_one_version_though_mlflow_was_down(
    sweep, workspace, mlflow, page, platform
):
    page.goto(required_actions(platform, sweep))
    approve = page.get_by_role("button", name="Approve")
    approve.wait_for()
    supervisor = Supervisor(platform.runtime)
    with supervisor._rpc() as rpc:
        rpc.stopProcess(f"{GROUP}:mlflow", True)
    approve.click()
    time.sleep(20)
    assert sweep.state() == "running"
    supervisor.start("mlflow")
    sweep.wait_for_task("register", "success")
    wait_for(lambda: sweep.state() == "success", "the end")
    record = RegisterRecord.read(member_workspace(workspace, 0))
    assert record.verdict.decision == "promoted"
    assert record.verdict.reason.endswith("approved by admin")
    (version,) = mlflow.search_model_versions(f"name = '{MODEL}'")
    assert mlflow.get_registered_model(MODEL).aliases == {"champion": version.version}
    wait_for(lambda: statuses(mlflow, workspace) == ["FINISHED"] * 3, "closed", 60)


def test_each_decision_is_in_the_logbook_once(workspace):
    entries = read_logbook(member_workspace(workspace, 0))
    answers = [entry.cause for entry in entries if entry.key.startswith("answer")]
    assert len(answers) == 2
    assert "refused by admin" in answers[0]
    assert "approved by admin" in answers[1]


def required_actions(platform, run):
    address = f"{platform.settings.airflow_url}/dags/{run.dag_id}/runs/{run.run_id}"
    return f"{address}/tasks/register/required_actions"
