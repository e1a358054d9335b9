"""What Ray Train's controller does for a run beside polling its workers.

It lets workers take SIGTERM as a preemption's notice, tells them when a node of theirs is drained,
notes each failure in the logbook, gives up on a run that fails again and again without getting on,
lets workers save before their number changes, and tells the driver where a machine's memory ran
out.
"""

import logging
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller.state import (
    ReschedulingState,
    TrainControllerState,
)
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2._internal.execution.worker_group import (
    Worker,
    WorkerGroup,
    WorkerGroupPollStatus,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipelines.core.errors import UnreachableError, UserError
from pipelines.core.machine import oom_kills
from pipelines.recipe.recipe import Recipe
from pipelines.run.logbook import Entry, Kind, note
from pipelines.training import preemption
from pipelines.training.checkpoint.store import CheckpointStore, checkpoints_of
from pipelines.training.preemption import PreemptedError
from ray_jobs import notice
from ray_jobs.draining import draining

STAGE = "train"
FRUITLESS = 3  # failures in a row without a new checkpoint
RESIZE_GRACE_S = 120.0  # for a save before the number of workers changes
_LOOK_S = 2.0  # for an answer from a worker or a node that lives
_COUNT_S = 20.0  # for an answer from a process that must start first
_SHORT = re.compile(r"Memory on the node \(IP: ([^,]+), .*?\) was (\S+) used / (\S+) limit")
_REFUSED = "DefaultCPUAllocator: can't allocate memory"  # PyTorch's RuntimeError

_log = logging.getLogger(__name__)


class FruitlessError(Exception):
    """A run failed again and again and did not get on between."""


class HostOutOfMemoryError(Exception):
    """The memory of a machine ran out, and a worker with it; the driver says what comes next."""


class Progress:
    """Counts failures since the run last got on: a new complete checkpoint forgives all.

    So does a start from copies in memory after more steps than ever before.
    """

    def __init__(self, recipe: Recipe, workspace: Path) -> None:
        self._place = checkpoints_of(recipe, workspace)
        self._newest = 0  # the step of the last complete checkpoint
        self._newest = self._newest_checkpoint()
        self._failures = 0

    def failed(self, cause: str) -> None:
        """Count one more failure.

        Raises:
            FruitlessError: it is one too many.
        """
        if self.got_on():
            self._failures = 0
        self._failures += 1
        if self._failures >= FRUITLESS:
            raise FruitlessError(
                f"{self._failures} failures without a new checkpoint since step {self._newest}; "
                f"the last: {cause}"
            )

    def got_on(self) -> bool:
        """Return whether there is a checkpoint that is newer than those of the last call."""
        before, self._newest = self._newest, self._newest_checkpoint()
        return self._newest > before

    def _newest_checkpoint(self) -> int:
        try:
            store = CheckpointStore(self._place)
            start = store.start()
            return max([start.step if start else 0, *store.steps()])
        except UnreachableError as error:  # nobody knows of a newer one
            _log.warning("%s", error)
            return self._newest


class Overseer(ControllerCallback, WorkerGroupCallback):  # type: ignore[misc]  # Ray has no types
    """Lives in the driver, beside Ray Train's controller."""

    def __init__(self, recipe: Recipe, workspace: Path, life: str) -> None:
        """Made by the driver.

        Args:
            recipe: Of the run.
            workspace: Of the run.
            life: Of this controller, unlike that of any other.
        """
        self._workspace = workspace
        self._life = life
        self._progress = Progress(recipe, workspace)
        self._failures = 0
        self._workers: list[Worker] = []
        self._trains = False
        self._nodes: dict[str, tuple[str, int]] = {}  # of the workers: address by id
        self._own_node: str = ray.get_runtime_context().get_node_id()  # the driver's is the same
        self._kills = {self._own_node: oom_kills()}  # processes that the kernel ended, by node

    def after_worker_group_start(self, worker_group: WorkerGroup) -> None:
        """SIGTERM is from now on a notice to each worker."""
        self._workers, self._trains = worker_group.get_workers(), True
        ray.get([worker.execute_async(preemption.listen) for worker in self._workers])
        ours = [worker.metadata.node_id for worker in self._workers]
        counts = ray.get([worker.execute_async(oom_kills) for worker in self._workers])
        self._kills = dict(zip(ours, counts, strict=True))
        self._nodes = {
            node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"])
            for node in ray.nodes()
            if node["NodeID"] in ours
        }

    def after_worker_group_poll_status(self, worker_group_status: WorkerGroupPollStatus) -> None:
        """Note a failure; Ray Train then starts all workers anew, unless this raises.

        Raises:
            FruitlessError: the run fails without getting on.
            HostOutOfMemoryError: the memory of a machine ran out.
            PreemptedError: the job was asked to end or its own node is drained, and the workers
                have saved.
        """
        errors: Mapping[int, Exception] = worker_group_status.errors
        ends, leaving = notice.asked(), self._leaving()
        if not errors:
            # Told each time, as a run that does not train yet ignores it.
            if reason := "the job's time ends" if ends else "; ".join(leaving.values()):
                self._workers[0].execute_async(preemption.ask, reason)
            return
        saved = _preempted(errors)
        if saved and (ends or self._own_node in leaving):
            raise saved
        self._trains = False
        if saved and leaving:
            return  # no failure: the next workers are on other nodes
        self._failures += 1
        if any(map(_is_out_of_device_memory, errors.values())):
            return  # noted already, and the next layout is no more of the same
        cause = _first_line(next(iter(errors.values())))
        # These are in the logbook, or will be at the end.
        if not any(isinstance(error, PreemptedError | UserError) for error in errors.values()):
            kind, cause = self._fault(errors)
            _note(self._workspace, kind, f"{self._life}, failure {self._failures}", cause)
        self._progress.failed(cause)

    def after_controller_state_update(
        self,
        previous_state: TrainControllerState,  # noqa: ARG002 (Ray's signature)
        current_state: TrainControllerState,
    ) -> None:
        """Note a worker that died as it started, which no poll sees; as above."""
        if not isinstance(current_state, ReschedulingState):
            return
        error = getattr(current_state.training_failed_error, "controller_failure", None)
        if isinstance(error, WorkerGroupStartupFailedError):
            self._failures += 1
            cause = "a worker died as it started"
            if self._kernel_ran_out(self._kills):
                raise HostOutOfMemoryError(f"{cause}: the kernel ended it for want of memory")
            _note(self._workspace, "worker lost", f"{self._life}, failure {self._failures}", cause)
            self._progress.failed(cause)

    def before_controller_execute_resize_decision(self, resize_decision: ResizeDecision) -> None:
        """Let workers that train save before there are more or fewer of them."""
        if not self._trains:  # they have just failed, or are the first
            return
        reason = f"{resize_decision.num_workers} workers from now on"
        asked = [
            worker.execute_async(preemption.save_and_end, reason, RESIZE_GRACE_S)
            for worker in self._workers
        ]
        try:
            ray.get(asked, timeout=RESIZE_GRACE_S)
        except (RayActorError, GetTimeoutError) as error:
            _log.warning("no checkpoint before the number of workers changes: %s", error)

    def _leaving(self) -> dict[str, str]:
        """Return which nodes of the job are drained, each with a line about it."""
        lines = {}
        for node, seconds in draining().items():
            ranks = [r for r, w in enumerate(self._workers) if w.metadata.node_id == node]
            if ranks or node == self._own_node:
                host = self._nodes[node][0] if ranks else socket.gethostname()
                who = f"rank {', '.join(map(str, ranks))}" if ranks else "the driver"
                left = "" if seconds is None else f", and has {seconds:.0f} s left"
                lines[node] = f"node {host} of {who} is drained{left}"
        return lines

    def _fault(self, errors: Mapping[int, Exception]) -> tuple[Kind, str]:
        """Return what happened; a dead process shows first as broken connections of the others.

        Raises:
            HostOutOfMemoryError: the memory of a machine ran out.
        """
        if lost := [address for address in self._nodes.values() if not _answers(*address)]:
            return "node lost", f"{', '.join(host for host, _ in lost)} does not answer"
        ends = enumerate(_ends(self._workers))
        gone = {rank: error for rank, error in ends if error is not None}
        for error in (*gone.values(), *errors.values()):
            if is_out_of_memory(error):
                raise HostOutOfMemoryError(shortage_of(error))
        if gone:
            who = ", ".join(_name(rank, self._workers[rank]) for rank in gone)
            if self._kernel_ran_out(self._workers[rank].metadata.node_id for rank in gone):
                raise HostOutOfMemoryError(f"the kernel ended {who} for want of memory")
            return "worker lost", f"{who} died"
        rank, error = next(iter(errors.items()))
        return "worker lost", f"{_name(rank, self._workers[rank])} failed: {_first_line(error)}"

    def _kernel_ran_out(self, nodes: Iterable[str]) -> bool:
        """Return whether a node's kernel has ended more processes than when the workers began.

        Ray itself does not know which signal ended a worker.
        """
        before = {node: self._kills[node] for node in nodes}
        places = (NodeAffinitySchedulingStrategy(node, soft=False) for node in before)
        count = ray.remote(num_cpus=0)(oom_kills)
        asked = [count.options(scheduling_strategy=place).remote() for place in places]
        try:
            counts = ray.get(asked, timeout=_COUNT_S)
        except RayError as error:  # a death whose reason nobody knows is a lost worker
            _log.warning("a node does not tell whom its kernel ended: %s", _first_line(error))
            return False
        return any(now > then for now, then in zip(counts, before.values(), strict=True))


def _note(workspace: Path, kind: Kind, identity: str, cause: str) -> None:
    done = "all workers start anew from the last state that was kept"
    key = f"{STAGE}: {kind}: {identity}"
    note(workspace, Entry(kind=kind, key=key, stage=STAGE, cause=cause, done=done))


def _ends(workers: list[Worker]) -> list[Exception | None]:
    """Tell how each worker's process ended, or None where it answers."""
    asked = [worker.actor.get_metadata.remote() for worker in workers]
    ray.wait(asked, num_returns=len(asked), timeout=_LOOK_S)
    ends: list[Exception | None] = []
    for answer in asked:
        try:
            ray.get(answer, timeout=0.0)
            ends.append(None)
        except GetTimeoutError:
            ends.append(None)  # it lives, but is busy
        except Exception as error:
            ends.append(error)
    return ends


def _answers(host: str, port: int) -> bool:
    """Return whether a node's raylet lives: Ray itself finds out some seconds later."""
    try:
        with socket.create_connection((host, port), _LOOK_S):
            return True
    except OSError:
        return False


def _preempted(errors: Mapping[int, Exception]) -> PreemptedError | None:
    """Return what the workers say who saved and ended; any one speaks for all."""
    return next((each for each in errors.values() if isinstance(each, PreemptedError)), None)


def _is_out_of_device_memory(error: Exception) -> bool:
    """PyTorch's error, told by its name: the controller does not import it."""
    return f"{type(error).__module__}.{type(error).__name__}" == "torch.OutOfMemoryError"


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether the host is out of memory: Ray ended a worker, or the worker got no more."""
    cause = error.health_check_failure if isinstance(error, WorkerHealthCheckFailedError) else error
    return isinstance(cause, OutOfMemoryError | MemoryError) or _REFUSED in str(cause)


def shortage_of(error: Exception) -> str:
    """Return in one line which machine was short of memory; Ray's message has a page about it."""
    if found := _SHORT.search(str(error)):
        return "{} had {} of {} in use, and Ray ended workers".format(*found.groups())
    return _first_line(error)


def _name(rank: int, worker: Worker) -> str:
    return f"rank {rank} (process {worker.metadata.pid} on {worker.metadata.hostname})"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), repr(error))
