"""A Ray job as an Airflow task: submit it once, attach again, follow, resume and cancel it.

The submission id is `penstock-<hash(dag, run, task, map index, generation)>-<n>`. A task tries
n = 0, 1, …: absent → submit; pending or running → attach; succeeded with a valid result → done;
over without a result, or gone with its cluster → the next n. Ray refuses a known id, so two
processes cannot make two jobs. A user's Clear begins a new generation: see `job_state`.

A job that succeeded ends its task from the triggerer, without another process of the task, unless
OpenLineage's listener waits there for the task's end. After a
failed job that made progress, the next job starts in the same try, however often; only a job
without progress costs one of Airflow's retries. The end of an Airflow process neither stops nor
doubles a job. A job is stopped when a user acts on the task: by the trigger or the operator that
sees it, or by `pipelines.platform.reconciler` if neither could.
"""

import asyncio
import hashlib
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from airflow.sdk import BaseOperator, BaseOperatorLink
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from pipelines.core.settings import load_settings
from pipelines.core.storage import write_text
from pipelines.orchestration.job_state import Generation, JobState, OvertakenError, instance_name
from pipelines.orchestration.jobs_api import (
    ADDRESS_FILE,
    TOKEN_FILE,
    Job,
    jobs_api,
    ray_address,
    stop_job,
    upload_code,
)
from pipelines.orchestration.links import RayJobLink, RayJobLogLink
from pipelines.orchestration.ray_job_trigger import (
    LOST,
    UNREACHABLE,
    RayJobTrigger,
    failure_of,
    has_result,
)
from pipelines.orchestration.task_lineage import is_sent
from pipelines.orchestration.task_liveness import OVER, map_index_of, state_of, task_process
from pipelines.run.logbook import Entry, note
from pipelines.run.progress import ProgressReader
from pipelines.run.workspace import workspace_path
from pipelines.stages.stage_process import (
    RAY_JOB_VARIABLE,
    forget_error,
    stage_variables,
    user_error,
)

if TYPE_CHECKING:
    from airflow.sdk import Context


class TaskKilledError(BaseException):
    """Airflow ends this process of the task; like KeyboardInterrupt, `except Exception` misses it.

    Airflow then tries the task again, unless a user has decided otherwise.
    """


class RayJobOperator(BaseOperator):
    """Runs a command as a Ray job and defers, so that it holds no worker slot.

    It works in any DAG: `RayJobOperator(task_id="train", entrypoint="python train.py")`.

    Args:
        entrypoint: The shell command, run in the workspace with its code first on PYTHONPATH;
            without a workspace, in `working_dir`.
        workspace: A folder that Airflow and Ray share; its `progress.jsonl` holds the job's
            progress, and its `error.json` a user's error. If None, Airflow's processes keep the
            task's state in a folder of the home, of which the job knows nothing.
        working_dir: Without a workspace: a local folder whose code is sent to Ray.
        env: More environment variables of the job. Ray shows them: give no secrets.
        ray_conn_id: A connection of the type `ray_jobs`; if None, the platform's cluster.
        result: The file of the workspace that a job writes last; without it no job has succeeded.
        returns: The task's return value after a successful job, as JSON values.
        ship: The workspace's files and folders with the code, sent to Ray as a package that runs
            from each node's own disk; if empty, it is imported from the shared folder.
        poll_seconds: The longest time between two checks of the job.
        patience_seconds: How long a cluster may not answer before a retry is used up.
    """

    template_fields = ("workspace",)
    operator_extra_links: Collection[BaseOperatorLink] = (RayJobLink(), RayJobLogLink())

    def __init__(
        self,
        *,
        entrypoint: str,
        workspace: str | None = None,
        working_dir: str | None = None,
        env: Mapping[str, str] | None = None,
        ray_conn_id: str | None = None,
        result: str | None = None,
        returns: Any = None,
        ship: tuple[str, ...] = (),
        poll_seconds: float = 0.5,
        patience_seconds: float = 3600.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.stage: str = kwargs["task_id"]  # `self.task_id` begins with the task group's name
        self.entrypoint = entrypoint
        self.workspace = workspace or ""
        self.working_dir = working_dir
        self.env = dict(env or {})
        self.ray_conn_id = ray_conn_id
        self.is_alone = workspace is None
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
        """Continue after a job that did not succeed or was on another cluster."""
        with self._at_work(context, began=True) as state:
            return self._go_on(context, state, Job.model_validate(event))

    def skip(self) -> Any:
        """Return the task's result if it needs no job, else None; called before submission."""
        return None

    def show_links(self, context: "Context") -> None:
        """Show more links than the job's own; called in each process of the task."""

    def on_kill(self) -> None:
        """End this process; Airflow calls it when a user acts on the task, and at a shutdown.

        It runs in a signal handler, perhaps in a running event loop: `_at_work` does the rest.
        """
        raise TaskKilledError("Airflow ends this process of the task")

    @contextmanager
    def _at_work(self, context: "Context", *, began: bool = False) -> Iterator[JobState]:
        if self.is_alone:
            self._open_folder(context)
        workspace = Path(self.workspace)
        state = JobState.of(workspace, self.task_id, map_index_of(context))
        # A job that still runs in a removed workspace creates parts of it again.
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

    def _open_folder(self, context: "Context") -> None:
        """Make the folder of the task's state, among the workspaces, and name its cluster there."""
        ti = context["ti"]
        name = f"{ti.dag_id}__{ti.run_id}__{instance_name(ti.task_id, map_index_of(context))}"
        folder = workspace_path(load_settings().runs, name)
        folder.mkdir(parents=True, exist_ok=True)
        self.workspace = str(folder)
        if self.ray_conn_id and not (folder / ADDRESS_FILE).is_file():
            from pipelines.orchestration.ray_jobs_hook import RayJobsHook

            address, token = RayJobsHook(self.ray_conn_id).place()
            if token:
                write_text(folder / TOKEN_FILE, token, mode=0o600)
            write_text(folder / ADDRESS_FILE, address)

    def _go_on(self, context: "Context", state: JobState, event: Job | None = None) -> Any:
        """Find the job that counts and act on it; `event` is the awaited job at its end."""
        if event:
            self._show_job(context, str(event.submission_id))
        if event and event.status == UNREACHABLE:
            raise RuntimeError(event.message)
        try:
            return self._act(context, state, *self._walk(context, state, event))
        except OvertakenError:
            return self._go_on(context, state)

    def _act(self, context: "Context", state: JobState, job: Job, current: Generation) -> Any:
        """Return what a job that succeeded gives; else defer, and submit one if none is there."""
        if job.status == "SUCCEEDED":
            self._show_job(context, str(job.submission_id))
            return self.returns
        if job.status == LOST:
            forget_error(Path(self.workspace))
            if (skipped := self.skip()) is not None:
                return skipped
            self._submit(context, state, current, str(job.submission_id))
        raise self._deferral(context, state, job)

    def _walk(self, context: "Context", state: JobState, job: Job | None) -> tuple[Job, Generation]:
        """Return the live or successful job, or a LOST one with the id for the next job."""
        current = state.begin(context["ti"].max_tries)
        while True:
            submission_id = f"penstock-{_job_key(context, current.generation)}-{current.n}"
            if job is None or job.submission_id != submission_id:
                former = None if current.former_over else current.former
                job = asyncio.run(_find_job(Path(self.workspace), submission_id, former))
                over = current.former_over or job.status != UNREACHABLE
                # A process may have died between Ray's answer and its note.
                submitted = current.submitted or job.live
                current = state.update(current, former_over=over, submitted=submitted)
            absent = job.status == LOST and not current.submitted
            succeeded = job.status == "SUCCEEDED" and has_result(self.workspace, self.result)
            if absent or succeeded or job.live or job.status == UNREACHABLE:
                return job, current
            if submission_id in current.submissions:  # else the job belongs to a removed workspace
                current = self._note_failure(state, current, job)
            else:
                current = state.update(current, n=current.n + 1, submitted=False)

    def _note_failure(self, state: JobState, current: Generation, job: Job) -> Generation:
        """Note a job's failure; return if another job should follow, raise if Airflow decides."""
        workspace, failure = Path(self.workspace), failure_of(job)
        if message := user_error(workspace, self.stage):
            raise AirflowFailException(message)
        reached = _reached(workspace, current.offset)
        further = any(done > current.best.get(what, 0) for what, done in reached.items())
        done = "the next job continues there" if further else "no progress: one retry is used up"
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
        best = {**current.best, **reached} if further else current.best
        # In one write: a process that died between two would leave progress that counts as none.
        changes = {"n": current.n + 1, "submitted": False}
        current = state.update(current, best=best, **changes)
        if not further:
            raise RuntimeError(failure.cause)
        return current

    def _submit(
        self, context: "Context", state: JobState, current: Generation, submission_id: str
    ) -> None:
        if submission_id not in current.submissions:  # else its offset is from before its lines
            offset = ProgressReader.at_end(Path(self.workspace)).offset
            submissions = (*current.submissions, submission_id)
            current = state.update(current, submissions=submissions, offset=offset)
        try:
            asyncio.run(self._send(context, submission_id))
        except httpx.TransportError as error:
            self.log.warning("Ray does not answer (%r); waiting for it", error)
        else:
            state.update(current, submitted=True)
            self.log.info("submitted Ray job %s", submission_id)

    async def _send(self, context: "Context", submission_id: str) -> None:
        workspace = Path(self.workspace)
        entrypoint, variables = self.entrypoint, dict(self.env)
        if not self.is_alone:
            entrypoint, more = job_command(workspace, self.entrypoint)
            variables |= more
        variables[RAY_JOB_VARIABLE] = submission_id
        async with jobs_api(workspace) as jobs:
            runtime_env: dict[str, Any] = {"env_vars": variables}
            if self.working_dir:
                code = Path(self.working_dir)
                names = sorted(path.name for path in code.iterdir() if path.name[0] != ".")
                runtime_env |= {"working_dir": await upload_code(jobs, code, names)}
            if self.ship:
                runtime_env |= {"working_dir": await upload_code(jobs, workspace, self.ship)}
                variables["PYTHONSAFEPATH"] = "1"  # do not run code from the working directory
            metadata = _metadata(context, workspace)
            await jobs.submit(submission_id, entrypoint, runtime_env, metadata)

    def _show_job(self, context: "Context", submission_id: str) -> None:
        """Show the job's links in each process of the task, as Airflow stores the last one's."""
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
                calls_back=is_sent(),
            ),
            method_name="resume",
        )


def job_command(workspace: Path, entrypoint: str) -> tuple[str, dict[str, str]]:
    """Return the shell command and the environment variables of a job that runs in a workspace."""
    return f"cd {shlex.quote(str(workspace))} && {entrypoint}", stage_variables(workspace)


async def _find_job(workspace: Path, submission_id: str, former: str | None) -> Job:
    """Return the job from Ray, or one LOST or UNREACHABLE, after the former job has ended.

    Raises:
        TimeoutError: The former job, which a user ended, does not end.
    """
    try:
        async with jobs_api(workspace) as jobs:
            if former:
                await jobs.end(former)
            return await jobs.get(submission_id) or Job(submission_id=submission_id, status=LOST)
    except httpx.TransportError as error:
        return Job(submission_id=submission_id, status=UNREACHABLE, message=repr(error))


def _reached(workspace: Path, offset: int) -> dict[str, float]:
    """Return how far a job came, by unit; its lines in the progress file begin at `offset`."""
    reached: dict[str, float] = {}
    for event in ProgressReader(workspace, offset).read():
        reached[event.unit] = max(event.done, reached.get(event.unit, 0))
    return reached


def _metadata(context: "Context", workspace: Path) -> dict[str, str]:
    """Return metadata by which the reconciler finds the job's task; Ray takes strings only."""
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
