"""Who is hurt, and how: processes of a run and of the platform, found as an operator would."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock

from pipelines.core.storage import MARKER, read_json
from pipelines.orchestration.job_state import JobState, instance_name
from pipelines.platform.supervisor import GROUP, Supervisor
from pipelines.run.records import JOBS
from pipelines.stages.train.train_diagnostics import DIAGNOSTICS
from pipelines.training.checkpoint.store import CHECKPOINTS
from tests.conftest import Platform
from tests.faults.pipeline_run import START_LIMIT_S, PipelineRun, until

FIND_LIMIT_S = 60.0


def find(platform: Platform, fits: Callable[[psutil.Process], bool], what: str) -> psutil.Process:
    """The first of the platform's processes that fits, as soon as there is one."""

    def look() -> psutil.Process | None:
        for process in platform.processes():
            with suppress(psutil.Error):
                if fits(process):
                    return process
        return None

    return until(look, what, FIND_LIMIT_S)


def train_worker(run: PipelineRun, rank: int) -> psutil.Process:
    """The process that trains as a rank: it has its file for stacks open."""
    file = str(run.workspace / DIAGNOSTICS / "heartbeats" / f"rank-{rank}.stacks.txt")
    return find(
        run.platform,
        lambda process: any(each.path == file for each in process.open_files()),
        f"the train worker of rank {rank}",
    )


def job_driver(run: PipelineRun, stage: str) -> psutil.Process:
    """The driver of a stage's Ray job."""
    return find(
        run.platform,
        lambda process: (
            process.cmdline()[1:] == ["-m", "ray_jobs.stage_job", stage]
            and process.cwd() == str(run.workspace)
        ),
        f"the driver of {stage}",
    )


def airflow_task(run: PipelineRun, task_id: str) -> psutil.Process:
    """The process in which a task's operator runs, as soon as it is at work."""
    run.wait_for_task(task_id, "running")
    task = run.task(task_id)["id"]
    process = find(
        run.platform,
        lambda process: process.cmdline()[0] == f"airflow worker -- {task}",
        f"the Airflow task process of {task_id}",
    )
    presence = _presence(run, task_id)
    run.wait(
        lambda: presence.exists() and read_json(presence)["pid"] == process.pid,
        f"{task_id} at work",
        FIND_LIMIT_S,
        every=0.02,
    )
    return process


@contextmanager
def handing_over(run: PipelineRun, task_id: str) -> Iterator[psutil.Process]:
    """A task's process, held in the block: Ray has its job, Airflow doesn't know that it waits.

    The task gives up its place a few milliseconds after it noted that Ray has the job, so that
    watching for the note would come too late. Whoever has the lock of the task's state keeps it
    from the note, and has the time of one request to take it.
    """
    state, presence = JobState.of(run.workspace, task_id, -1), _presence(run, task_id)
    run.wait(presence.exists, f"{task_id} at work", START_LIMIT_S, every=0.01)
    process = psutil.Process(read_json(presence)["pid"])
    process.nice(5)  # on a busy machine this test goes on before it
    run.wait(lambda: state.read().submissions, f"{task_id}'s job", START_LIMIT_S, every=0.001)
    with FileLock(state.path.with_suffix(".lock")).acquire(poll_interval=0.001):
        job_driver(run, task_id)
        process.suspend()
    try:
        assert run.task_state(task_id) == "running", "the task had deferred"
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def _presence(run: PipelineRun, task_id: str) -> Path:
    return run.workspace / JOBS / f"{instance_name(task_id, -1)}.process.json"


def service(platform: Platform, name: str) -> psutil.Process:
    """A part of the platform."""
    return psutil.Process(Supervisor(platform.runtime).processes()[name].pid)


def wait_until_seen(platform: Platform) -> None:
    """Wait until the reconciler knows the processes that all parts of the platform have now."""
    seen = platform.settings.home / "services" / "watch.json"

    def is_known() -> bool:
        parts = Supervisor(platform.runtime).processes().values()
        return read_json(seen)["pids"] == {each.name: each.pid for each in parts if each.pid}

    until(is_known, "a reconciler that knows all parts", START_LIMIT_S)


def kill(*processes: psutil.Process) -> None:
    """kill -9, and wait for the end."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    until(lambda: all(map(has_ended, processes)), "an end by kill -9", 10, every=0.01)


def kill_tree(*roots: psutil.Process) -> None:
    """kill -9 of processes and all that they started."""
    kill(*roots, *(child for root in roots for child in root.children(recursive=True)))


def has_ended(process: psutil.Process) -> bool:
    """Whether it is gone, though its parent may not have looked yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def terminate(processes: list[psutil.Process], grace: float) -> None:
    """What a preemption does: SIGTERM, and kill -9 to who is left after the grace time.

    Nobody may be left.
    """
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and not all(map(has_ended, processes)):
        time.sleep(0.05)
    late = [process for process in processes if not has_ended(process)]
    kill(*late)
    assert not late, f"{len(late)} processes had not ended {grace:.0f} s after SIGTERM"


@contextmanager
def kept_down(platform: Platform, *names: str) -> Iterator[None]:
    """Parts of the platform die by kill -9, and are down for as long as the block lasts."""
    supervisor = Supervisor(platform.runtime)
    roots = [service(platform, name) for name in names]
    victims = [*roots, *(child for root in roots for child in root.children(recursive=True))]
    # Frozen, they don't see the SIGTERM by which supervisord learns not to start them again.
    for process in victims:
        process.suspend()
    with supervisor._rpc() as rpc:
        for name in names:
            rpc.stopProcess(f"{GROUP}:{name}", False)
    kill(*victims)
    until(
        lambda: all(supervisor.processes()[name].stopped for name in names),
        f"supervisord to know that {names} are down",
        10,
    )
    try:
        yield
    finally:
        for name in names:
            supervisor.start(name)


def wait_until_ready(platform: Platform) -> None:
    """Until every part answers."""
    until(
        lambda: platform.penstock("status").returncode == 0,
        "every part of the platform to answer",
        START_LIMIT_S,
        every=1,
    )


@contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    """A process stands still in the block; one that was killed there stays dead."""
    process.suspend()
    until(lambda: process.status() == psutil.STATUS_STOPPED, "a process to stop", 5, every=0.001)
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def kill_at(process: psutil.Process, moment: Callable[[], bool], what: str) -> None:
    """kill -9 in a moment of milliseconds: frozen first, and let go where the moment is over."""
    deadline = time.monotonic() + FIND_LIMIT_S
    while True:
        until(moment, what, deadline - time.monotonic(), every=0.0002)
        with frozen(process):
            if moment():
                kill(process)
                return


def writes_checkpoint(run: PipelineRun) -> bool:
    """Whether the newest checkpoint has files, but not all of them."""
    newest = _newest_checkpoint(run)
    return newest is not None and any(newest.glob("*.distcp")) and not _metadata(newest)


def lacks_marker(run: PipelineRun) -> bool:
    """Whether the newest checkpoint is whole but for its marker."""
    newest = _newest_checkpoint(run)
    return newest is not None and _metadata(newest) and not (newest / MARKER).exists()


def _newest_checkpoint(run: PipelineRun) -> Path | None:
    names = (each.name for each in os.scandir(run.workspace / CHECKPOINTS))
    newest = max((name for name in names if name.startswith("step-")), default=None)
    return newest and run.workspace / CHECKPOINTS / newest


def _metadata(checkpoint: Path) -> bool:
    return (checkpoint / ".metadata").exists()
