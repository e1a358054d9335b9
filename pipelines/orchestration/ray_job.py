"""A Ray job as an Airflow task: submitted once, reattached, followed, resumed and cancelled.

The submission id is `penstock-<hash(dag, run, task, map index, generation)>-<n>`. A task walks
n = 0, 1, …: absent → submit; pending or running → attach; succeeded with a valid result → done;
over without one, or gone with its cluster → the next n. Ray refuses a known id, so two walkers
can't make two jobs. What a user clears begins a new generation: see `job_state`.

A job that succeeded ends its task from the triggerer, with no other process of the task. One that
came further than all before it is followed by the next one within the same try, however
often; only one that made no progress costs one of Airflow's retries. An end of Airflow's processes
neither stops nor doubles a job. It is stopped where a user acts on the task: by the trigger or
the operator that sees it, and by `pipelines.platform.reconciler` where neither could.
"""

import asyncio
import hashlib
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from airflow.sdk import BaseOperator, BaseOperatorLink
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from pipelines.core.settings import load_settings
from pipelines.orchestration.job_state import Generation, JobState
from pipelines.orchestration.jobs_api import Job, jobs_api, ray_address, stop_job, upload_code
from pipelines.orchestration.links import RayJobLink, RayJobLogLink
from pipelines.orchestration.ray_job_trigger import (
    LOST,
    UNREACHABLE,
    RayJobTrigger,
    failure_of,
    has_result,
)
from pipelines.orchestration.task_liveness import OVER, map_index_of, state_of, task_process
from pipelines.run.logbook import Entry, note
from pipelines.run.progress import ProgressReader
from pipelines.stages.stage_process import (
    RAY_JOB_VARIABLE,
    forget_error,
    stage_variables,
    user_error,
)

if TYPE_CHECKING:
    from airflow.sdk import Context


class TaskKilledError(BaseException):
    """Airflow ends this process of the task; like KeyboardInterrupt, nothing on the way stops it.

    Airflow then tries the task again, unless a user has decided otherwise.
    """


class RayJobOperator(BaseOperator):
    """Runs a command as a Ray job and defers, so that it holds no worker slot.

    Args:
        entrypoint: the shell command, run in the workspace with its code first on PYTHONPATH.
        workspace: a folder that Airflow and Ray share; the job's progress is read from its
            `progress.jsonl`, a user's error from its `error.json`.
        result: the file of the workspace that a job leaves last; without it none has succeeded.
        returns: the task's return value after a job that succeeded; what JSON can say.
        ship: files and folders of the workspace with the code, which then goes to Ray as a package
            and runs from each node's own disk; none: it is imported from the shared folder.
        poll_seconds: between two looks at the job.
        patience_seconds: how long a cluster may give no answer before a retry is used up.
    """

    template_fields = ("workspace",)
    operator_extra_links: Collection[BaseOperatorLink] = (RayJobLink(), RayJobLogLink())

    def __init__(
        self,
        *,
        entrypoint: str,
        workspace: str,
        result: str | None = None,
        returns: Any = None,
        ship: tuple[str, ...] = (),
        poll_seconds: float = 0.5,
        patience_seconds: float = 3600.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.stage: str = kwargs["task_id"]  # `self.task_id` has the name of a task group before it
        self.entrypoint = entrypoint
        self.workspace = workspace
        self.result = result
        self.returns = returns
        self.ship = ship
        self.poll_seconds = poll_seconds
        self.patience_seconds = patience_seconds
        self.links: dict[str, str] = {}

    def execute(self, context: "Context") -> Any:
        """Attach to the task's job, or submit it, and defer until it ends."""
        with self._at_work(context) as state:
            return self._go_on(context, state)

    def resume(self, context: "Context", event: dict[str, Any]) -> Any:
        """Go on after the end of a job that did not succeed, or was another cluster's."""
        with self._at_work(context, began=True) as state:
            return self._go_on(context, state, Job.model_validate(event))

    def skip(self) -> Any:
        """What the task returns where it needs no job; asked before one is submitted."""
        return None

    def show_links(self, context: "Context") -> None:
        """Show links besides the job's own; called in each process of the task."""

    def on_kill(self) -> None:
        """End this process; Airflow calls it where a user acts on the task, and at a shutdown.

        It comes in a signal handler, perhaps inside a running event loop: `_at_work` does the rest.
        """
        raise TaskKilledError("Airflow ends this process of the task")

    @contextmanager
    def _at_work(self, context: "Context", *, began: bool = False) -> Iterator[JobState]:
        workspace = Path(self.workspace)
        state = JobState.of(workspace, self.task_id, map_index_of(context))
        # A job that lives on in a workspace that was removed makes parts of it anew.
        with task_process(workspace, context, state.path if began else workspace):
            self.show_links(context)
            try:
                yield state
            except TaskKilledError:
                submissions = state.read().submissions
                if submissions and state_of(context["ti"]) in OVER:
                    state.close(submissions[-1])
                    asyncio.run(stop_job(submissions[-1], workspace))
                raise

    def _go_on(self, context: "Context", state: JobState, event: Job | None = None) -> Any:
        """Walk to the job that counts; `event` is how the one that was waited for ended."""
        if event:
            self._show_job(context, str(event.submission_id))
        if event and event.status == UNREACHABLE:
            raise RuntimeError(event.message)
        job = self._walk(context, state, event)
        if job.status == "SUCCEEDED":
            self._show_job(context, str(job.submission_id))
            return self.returns
        if job.status == LOST:
            forget_error(Path(self.workspace))
            if (skipped := self.skip()) is not None:
                return skipped
            self._submit(context, state, str(job.submission_id))
        raise self._deferral(context, state, job)

    def _walk(self, context: "Context", state: JobState, job: Job | None) -> Job:
        """The job that lives or has the result, or LOST with the id by which to submit one."""
        current = state.begin(context["ti"].max_tries)
        while True:
            submission_id = f"penstock-{_job_key(context, current.generation)}-{current.n}"
            if job is None or job.submission_id != submission_id:
                former = None if current.former_over else current.former
                job = asyncio.run(_find_job(Path(self.workspace), submission_id, former))
                over = current.former_over or job.status != UNREACHABLE
                current = state.update(former_over=over)
            absent = job.status == LOST and not current.submitted
            succeeded = job.status == "SUCCEEDED" and has_result(self.workspace, self.result)
            if absent or succeeded or job.live or job.status == UNREACHABLE:
                return job
            if submission_id in current.submissions:  # else it is of a workspace that is gone
                self._note_failure(state, current, job)
            current = state.update(n=current.n + 1, submitted=False)

    def _note_failure(self, state: JobState, current: Generation, job: Job) -> None:
        """Note a job's failure; return where another is to follow, raise where Airflow decides."""
        workspace, failure = Path(self.workspace), failure_of(job)
        if message := user_error(workspace, self.stage):
            raise AirflowFailException(message)
        reached = _reached(workspace, current.offset)
        further = any(done > current.best.get(what, 0) for what, done in reached.items())
        done = "the next job goes on from there" if further else "no progress: one retry is used up"
        step = reached.get("steps")
        note(
            workspace,
            Entry(
                kind=failure.kind,
                key=f"{job.submission_id} {failure.kind}",
                stage=self.stage,
                cause=failure.cause,
                done=done,
                step=None if step is None else int(step),
            ),
        )
        self.log.error("%s; %s\n%s", failure.cause, done, job.message or "")
        state.update(best={**current.best, **reached} if further else current.best)
        if not further:
            state.update(n=current.n + 1, submitted=False)
            raise RuntimeError(failure.cause)

    def _submit(self, context: "Context", state: JobState, submission_id: str) -> None:
        progress = ProgressReader.at_end(Path(self.workspace))
        earlier = [name for name in state.read().submissions if name != submission_id]
        state.update(submissions=(*earlier, submission_id), offset=progress.offset)
        try:
            asyncio.run(self._send(context, submission_id))
        except httpx.TransportError as error:
            self.log.warning("Ray gives no answer (%r); waiting for it", error)
        else:
            state.update(submitted=True)
            self.log.info("submitted Ray job %s", submission_id)

    async def _send(self, context: "Context", submission_id: str) -> None:
        workspace = Path(self.workspace)
        entrypoint, variables = job_command(workspace, self.entrypoint)
        variables[RAY_JOB_VARIABLE] = submission_id
        async with jobs_api(workspace) as jobs:
            runtime_env: dict[str, Any] = {"env_vars": variables}
            if self.ship:
                runtime_env |= {"working_dir": await upload_code(jobs, workspace, self.ship)}
                variables["PYTHONSAFEPATH"] = "1"  # the code in the working directory is not run
            metadata = _metadata(context, workspace)
            await jobs.submit(submission_id, entrypoint, runtime_env, metadata)

    def _show_job(self, context: "Context", submission_id: str) -> None:
        """Show the job's links in each process of the task: Airflow stores the last one's."""
        ray = ray_address(Path(self.workspace))
        RayJobLink().show(self, context, RayJobLink.address(ray, submission_id))
        RayJobLogLink().show(self, context, RayJobLogLink.address(ray, submission_id))

    def _deferral(self, context: "Context", state: JobState, job: Job) -> TaskDeferred:
        submission_id, offset = str(job.submission_id), state.read().offset
        if job.live:
            self.log.info("attached to Ray job %s", submission_id)
            offset = ProgressReader.at_end(Path(self.workspace)).offset
        self._show_job(context, submission_id)
        return TaskDeferred(
            trigger=RayJobTrigger(
                submission_id,
                self.workspace,
                str(state.path),
                offset,
                self.poll_seconds,
                self.patience_seconds,
                self.result,
                self.returns,
            ),
            method_name="resume",
        )


def job_command(workspace: Path, entrypoint: str) -> tuple[str, dict[str, str]]:
    """The shell command and the environment variables of a job that runs in a workspace."""
    return f"cd {shlex.quote(str(workspace))} && {entrypoint}", stage_variables(workspace)


async def _find_job(workspace: Path, submission_id: str, former: str | None) -> Job:
    """The job as Ray has it, or LOST or UNREACHABLE; a former one, which a user ended, is over.

    Raises:
        TimeoutError: the former one lives on.
    """
    try:
        async with jobs_api(workspace) as jobs:
            if former:
                await jobs.end(former)
            return await jobs.get(submission_id) or Job(submission_id=submission_id, status=LOST)
    except httpx.TransportError as error:
        return Job(submission_id=submission_id, status=UNREACHABLE, message=repr(error))


def _reached(workspace: Path, offset: int) -> dict[str, float]:
    """How far a job came, by what it counted, from where its lines in the progress file begin."""
    reached: dict[str, float] = {}
    for event in ProgressReader(workspace, offset).read():
        reached[event.unit] = max(event.done, reached.get(event.unit, 0))
    return reached


def _metadata(context: "Context", workspace: Path) -> dict[str, str]:
    """Make what the reconciler knows the job's task by; Ray takes strings only."""
    ti = context["ti"]
    return {
        "home": str(load_settings().home),
        "workspace": str(workspace),
        "dag_id": ti.dag_id,
        "dag_run_id": ti.run_id,
        "task_id": ti.task_id,
        "map_index": str(map_index_of(context)),
        "max_tries": str(ti.max_tries),
        "began": ti.start_date.isoformat(),
    }


def _job_key(context: "Context", generation: int) -> str:
    ti = context["ti"]
    parts = (ti.dag_id, ti.run_id, ti.task_id, ti.map_index, generation)
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]
