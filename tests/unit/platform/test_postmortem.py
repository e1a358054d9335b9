"""`penstock why` names what happened first to runs of the real stage and its real writers."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import HTTPServer
from types import SimpleNamespace

import pytest
import torch
from airflow.sdk.exceptions import AirflowFailException
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.orchestration.job_state import Generation, JobState
from pipelines.orchestration.jobs_api import Job
from pipelines.orchestration.ray_job_trigger import LOST, failure_of
from pipelines.orchestration.task_liveness import service_lost, task_process
from pipelines.orchestration.webhook import keep_failure
from pipelines.platform.watch import decisions
from pipelines.recipe.recipe_files import override_values
from pipelines.run.logbook import Entry, note, read_logbook
from pipelines.run.records import output_folder
from pipelines.run.speed import CURVES
from pipelines.run.usage import metered
from pipelines.run.workspace import Run, workspace_path
from pipelines.stages.stage_process import keep_error
from pipelines.training import preemption
from pipelines.training.checkpoint import checkpointer, patience
from pipelines.training.preemption import PreemptedError
from ray_jobs import train_overseer
from ray_jobs.memory_shortage import MemoryShortage
from ray_jobs.train_overseer import HostOutOfMemoryError
from tests.faults.small_disk import full, small_disk
from tests.unit.orchestration.fake_ray import FakeRay
from tests.unit.platform.signs_in import SignsIn
from tests.unit.stages.test_time_limit import STAGE
from tests.unit.stages.train.test_train_stage import RECIPE, make_workspace

RUN = "tiny-20261127"


@pytest.fixture(autouse=True)
def nothing_else_answers(monkeypatch):
    for variable in ("PENSTOCK_AIRFLOW_URL", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")


@pytest.fixture
def workspace(home, mlflow_run):
    folder = make_workspace(workspace_path(load_settings().runs, RUN))
    facts = {"git_commit": "0" * 40, "dirty": False, "recipe_fingerprint": ""}
    Run(dag_run_id=RUN, mlflow_run_id=mlflow_run, **facts).write(folder)
    return folder


def train(workspace, report=None, **overrides):
    """As the stage's process does it."""
    from pipelines.stages.train import train_stage

    try:
        with metered(workspace, "train"):
            train_stage.run(override_values(RECIPE, overrides), workspace, report)
    except UserError as error:
        keep_error(workspace, "train", error)


def at(step, act):
    """A report that does something after a step."""

    def report(metrics):
        if metrics.step == step:
            act()

    return report


def fail(error):
    def act():
        raise error

    return act


def told(*arguments):
    result = CliRunner().invoke(app, ["why", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def lines():
    found = told(RUN).splitlines()
    assert len(found) <= 10
    return found


def test_a_run_that_went_well(workspace):
    train(workspace)
    first, outcome, cost, spent, do = lines()
    assert first == "Nothing that is recorded went wrong."
    assert outcome.startswith("The run is not over; it last got on at 20")
    assert outcome.endswith("; Airflow told nothing, so this is from its folder.")
    assert re.fullmatch(r"Lost: nothing that is measured. Used: \S+ worker-hours, 0 GPU-.*", cost)
    assert re.search(r"^Time: train .* s; .*; from the stage cache: nothing; training bound", spent)
    assert do == f"What to do: nothing; `penstock explain {RUN}` tells why stages ran."


def test_a_device_out_of_memory(workspace):
    train(workspace, at(5, fail(torch.OutOfMemoryError())))
    first, then, outcome, *_, do = lines()
    assert first.startswith("Memory ran out: out of memory with ")
    assert ", about step 5, 20" in first
    assert "would take" in then
    assert outcome.startswith("The run failed in train; ")
    assert "then clear train, which goes on after step 4. Last lines: /" in do


def test_a_machine_out_of_memory(workspace):
    shortage = MemoryShortage(RECIPE, workspace, on_gpus=True)
    shortage.met("life", HostOutOfMemoryError("10.0.0.1 had 9GB of 10GB in use"))
    train(workspace)
    assert lines()[0].startswith("Memory ran out: 10.0.0.1 had 9GB of 10GB in use (train, 20")


def test_a_loss_that_is_no_number(workspace):
    settings = {"train.lr": 1e18, "train.max_bad_steps": 2, "train.max_rollbacks": 1}
    train(workspace, **settings, **{"train.checkpoint_every": 1, "train.steps": 20})
    first, *followed = lines()
    assert first.startswith("Steps in a row were bad: 2 bad steps in a row up to step ")
    assert "went back to step" in followed[0]
    assert "Steps in a row were bad: the loss is " in followed[1]


def test_a_stall(workspace):
    held = threading.Event()
    train(workspace, at(3, lambda: held.wait(3)), **{"train.stall_seconds": 1.0})
    assert re.match(
        r"Training stood still: no move for 1 s: rank 0 on .*, about step 3", lines()[0]
    )


def test_a_preemption(workspace, monkeypatch):
    monkeypatch.setattr(preemption, "_NOTICE_S", 0.0)
    before = signal.getsignal(signal.SIGTERM)
    preemption.listen()
    with pytest.raises(PreemptedError):
        train(workspace, at(2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    signal.signal(signal.SIGTERM, before)
    assert lines()[1].startswith("  Then: saved in ")
    train(workspace)
    first, _, resumed, *_ = lines()
    assert first.startswith("A process was told to end (preemption): SIGTERM to process ")
    assert "training goes on after step" in resumed
    assert "train" in next(line for line in lines() if "in 2 tries" in line)


def test_a_full_disk(workspace, tmp_path, monkeypatch):
    for module in (checkpointer, patience):
        monkeypatch.setattr(module, "RETRY_S", 0.2)
    with small_disk(tmp_path / "disk", 16) as disk:
        filled = full(disk)

        def act(metrics):
            if metrics.step == 1:
                filled.__enter__()
            if metrics.step == 5:
                filled.__exit__(None, None, None)

        train(workspace, act, **{"train.checkpoints": str(disk)})
    first, then, *_ = lines()
    assert first.startswith("Storage could not be written: ")
    assert "No space left on device (train, about step " in first
    assert then.startswith("  Then: training goes on and saves again")


def test_a_changed_data_file(workspace):
    shard = output_folder(workspace, "preprocess") / "tokens" / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    train(workspace)
    assert lines()[0].startswith(f"An error ended the stage: {shard}: ")


def test_a_time_limit(workspace):
    subprocess.run([sys.executable, "-c", STAGE, "0.2", "30"], cwd=workspace)
    assert lines()[0].startswith("The time limit was reached: resources.max_stage_hours = ")


def test_a_lost_worker_and_what_it_cost(workspace):
    with pytest.raises(InterruptedError):
        train(workspace, at(5, fail(InterruptedError())))
    train_overseer._note(workspace, "worker lost", "a life, failure 1", "rank 1 (process 7) died")
    train(workspace, **{"train.checkpoint_every": 2})
    first, then, resumed, *_ = lines()
    assert first.startswith("A train worker was lost: rank 1 (process 7) died (train, about step 5")
    assert then == "  Then: all workers start anew from the last state that was kept."
    assert "training goes on after step 4 of 6 on 1 workers" in resumed
    cost = json.loads(told(RUN, "--json"))["cost"]
    assert cost["steps_again"] == 1
    assert cost["seconds_lost"] > 0
    assert "of training, 1 steps done again" in told(RUN)


def test_a_process_that_was_killed_where_nobody_watched(workspace):
    with pytest.raises(InterruptedError):
        train(workspace, at(5, fail(InterruptedError())))
    train(workspace)
    assert lines()[0].startswith("Training had to start again: the try before this one has ended")


COMMAND = {"error_type": "JOB_ENTRYPOINT_COMMAND_ERROR"}
ENDS = {
    "The Ray cluster was lost: the Ray cluster of Ray job a is gone": {"status": LOST},
    "The job's driver was lost: the driver of Ray job a was ended by SIGKILL": COMMAND
    | {"driver_exit_code": -9},
    "A process was told to end (preemption): the driver of Ray job a": COMMAND
    | {"driver_exit_code": 143},
    "A node was lost: Ray job a: its node has died": {
        "error_type": "JOB_SUPERVISOR_ACTOR_DIED",
        "message": "its node has died",
    },
    "A user stepped in: Ray job a was stopped, but not by Airflow": {"status": "STOPPED"},
    "An error ended the stage: Ray job a failed with exit code 1": COMMAND
    | {"driver_exit_code": 1},
}


def end_of_job(workspace, **job):
    """What the operator notes of a job that is over."""
    values = {"submission_id": "a", "status": "FAILED"} | job
    failure = failure_of(Job.model_validate(values))
    facts = {"stage": "train", "done": "no progress: one retry is used up"}
    note(workspace, Entry(kind=failure.kind, key="a", cause=failure.cause, **facts))


@pytest.mark.parametrize("first", ENDS)
def test_the_end_of_a_job(workspace, first):
    end_of_job(workspace, **ENDS[first])
    assert lines()[0].startswith(first)


def test_a_lost_task(workspace):
    killed = []
    for number in (1, 2):
        context = {"ti": SimpleNamespace(task_id="train", map_index=-1, try_number=number)}
        killed.append(task_process(workspace, context))
        killed[-1].__enter__()
    assert lines()[0].startswith("An Airflow task's process was lost: Airflow's process ")


def test_parts_of_the_platform_that_are_lost_together(workspace):
    for part in ("scheduler", "triggerer"):
        note(workspace, service_lost(part, 1, 2, "platform"))
    assert "the process of scheduler, 1, ended; the process of triggerer, 1, ended" in lines()[0]


def test_a_clock_that_was_put_on_costs_no_day(workspace):
    said = {"kind": "clock", "stage": "platform", "cause": "that of vm was put on by 24 h"}
    train(workspace, at(5, lambda: note(workspace, Entry(key="c", done="", **said))))
    first, *rest = lines()
    assert first.startswith("The clock jumped: that of vm was put on by 24 h (platform, about step")
    assert any(line.startswith("Lost: nothing that is measured.") for line in rest)


def test_a_user(workspace):
    asked = {"key": "answer to try 1 of register", "stage": "register", "cause": "yes"}
    note(workspace, Entry(kind="human decision", done="it becomes the champion", **asked))
    assert lines()[0] == "Nothing that is recorded went wrong."
    extra = json.dumps({"dag_run_id": RUN, "task_ids": ["train"]})
    event = {"event": "post_clear_task_instances", "dag_id": "llm_pipeline", "extra": extra}
    (decision,) = decisions(event | {"run_id": RUN, "task_id": None})
    facts = {"stage": decision.task, "done": "its job is stopped"}
    note(
        workspace, Entry(kind="human decision", key="a", cause=f"admin {decision.what} it", **facts)
    )
    assert lines()[0].startswith("A user stepped in: admin cleared it (train")


def test_what_a_run_got_over_does_not_lead(workspace):
    note(workspace, service_lost("scheduler", 1, 2, "platform"))
    train(workspace, at(5, fail(UserError("the disk is made of cheese; buy another"))))
    first, before, *_ = lines()
    assert first.startswith("An error ended the stage: the disk is made of cheese; buy another (")
    assert before == "  Before, the run got over: service lost (1)."


def test_mlflows_locked_database_which_only_its_log_tells(workspace):
    train(workspace)
    usage = workspace / "usage.jsonl"
    began, *others = usage.read_text().splitlines()
    earlier = json.loads(began) | {"time": time.time() - 60}
    usage.write_text("\n".join([json.dumps(earlier), *others, ""]))
    moments = [time.localtime(0), time.localtime(time.time() - 30)]
    log = load_settings().home / "services" / "mlflow.log"
    log.parent.mkdir()
    said = "ERROR mlflow.server.handlers: (sqlite3.OperationalError) database is locked"
    dated = [time.strftime(f"%Y/%m/%d %H:%M:%S {said}\n", moment) for moment in moments]
    log.write_text(f"sqlalchemy.exc.OperationalError: database is locked\n{''.join(dated)}")
    first = "A service was lost: MLflow's database was locked (platform, "
    assert lines()[0].startswith(f"{first}{time.strftime('%Y', time.gmtime())}")


def test_a_run_that_could_not_begin(home):
    folder = workspace_path(load_settings().runs, "early")
    keep_error(folder, "prepare", UserError("the source has no file; name one"))
    first = "An error ended the stage: the source has no file; name one (prepare, "
    assert told().startswith(first)  # the newest
    assert "What to do: mend what it names; then start it again." in told("early")


def test_a_workspace_that_is_gone_and_what_was_written_there_since(home):
    folder = workspace_path(load_settings().runs, RUN)
    keep_error(folder, "train", UserError("step-000080: the checkpoint can't be written"))
    with pytest.raises(AirflowFailException) as error, task_process(folder / "no", {}):
        pytest.fail("there is nothing to work in")
    context = {"dag_run": SimpleNamespace(dag_id="llm_pipeline", run_id=RUN)}
    keep_failure(context | {"exception": error.value, "ti": SimpleNamespace(task_id="train")})
    assert re.match("An error ended the stage: .*: the run's workspace was removed", lines()[0])
    assert "; then start it again. Last lines: " in lines()[-1]


def test_an_error_that_only_the_log_of_the_job_has(workspace, monkeypatch):
    ray = FakeRay()
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray.url)
    ray.jobs["logs"] = {"logs": "Traceback\n\x1b[36m(W pid=1)\x1b[0m ValueError: it broke\nbye\n"}
    with pytest.raises(RuntimeError), metered(workspace, "train"):
        raise RuntimeError
    assert lines()[0] == "Nothing recorded explains why train failed."
    assert "What to do: read the last lines; then clear train. Last lines: /" in told(RUN)
    logs = load_settings().home / f"airflow/logs/dag_id=llm_pipeline/run_id={RUN}"
    logs.mkdir(parents=True)
    assert lines()[-1].endswith(f"Last lines: {logs}.")
    JobState.of(workspace, "train", -1).update(Generation(), submissions=("a",))
    assert lines()[0].startswith("An error ended the stage: ValueError: it broke (train, 20")
    end_of_job(workspace, **COMMAND, driver_exit_code=1)
    assert lines()[0].startswith("An error ended the stage: ValueError: it broke (train")
    assert "no progress: one retry is used up" in lines()[1]
    ray.jobs["logs"] = {"logs": "RuntimeError: [1] DefaultCPUAllocator: can't allocate memory"}
    assert lines()[0].startswith("Memory ran out: RuntimeError: [1] DefaultCPUAllocator")
    ray.stop()


class Airflow(SignsIn):
    """Knows a run that failed in *validate*."""

    def do_GET(self):
        task = {"task_id": "validate", "state": "failed", "end_date": "2026-11-27T00:00:00Z"}
        known = {
            "/logs/2": {"event": "KeyError: 'column'", "level": "info"},
            "/taskInstances": {"task_instances": [task | {"try_number": 2}]},
            RUN: {"state": "failed"},
            "/version": {},
        }
        found = next((said for end, said in known.items() if self.path.endswith(end)), None)
        self.send_response(404 if found is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())


def test_a_platform_that_answers_is_asked(workspace, monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), Airflow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("PENSTOCK_AIRFLOW_URL", address)
    load_settings().airflow_password_path.parent.mkdir(parents=True, exist_ok=True)
    load_settings().airflow_password_path.write_text("any")
    first, outcome, *_, do = lines()
    server.shutdown()
    assert first.startswith("An error ended the stage: KeyError: 'column' (validate")
    assert outcome == "The run failed in validate."
    assert do.endswith(f"Last lines: {address}/dags/llm_pipeline/runs/{RUN}/tasks/validate.")


def test_a_run_that_became_slow_leads_with_that(workspace):
    train(workspace, **{"train.steps": 8})
    points = [json.loads(line) for line in (workspace / CURVES).open()]
    changes = {"step_seconds": 4, "tokens_per_second": 1 / 4, "data_wait_share": 0}
    for point in points:
        values = point["values"]
        values |= {"train/step_seconds": 0.5, "train/tokens_per_second": 200.0}
        for name, factor in changes.items() if point["step"] > 5 else ():
            values[f"train/{name}"] *= factor
    (workspace / CURVES).write_text("".join(f"{json.dumps(point)}\n" for point in points))
    assert lines()[0].startswith(
        "Training was slower in 3 of 8 windows, which end at steps 6 to 8: 50 tokens/s, usually "
        "200, which cost 4.5 s; steps waited for data for 0% of their time, usually"
    )


def test_a_bad_run_is_one_line(home):
    with pytest.raises(UserError, match=r"there is no run in .* yet; `penstock run` starts one"):
        told()
    with pytest.raises(UserError, match="there is no run 'two'"):
        told("two")


def test_many_faults_take_ten_lines(workspace):
    train(workspace)
    kinds = ("node lost", "preemption", "stall", "cluster lost", "storage", "worker lost")
    for kind in kinds:
        facts = {"key": kind, "stage": "train", "cause": "c", "done": "d"}
        note(workspace, Entry(kind=kind, **facts))
    assert len(read_logbook(workspace)) == 8
    assert sum(line.startswith("  ") for line in lines()) == 4
    assert "... 2 more in the logbook, at last: " in told(RUN)
