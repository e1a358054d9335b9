"""Checkpoints of a training run: written during training, and valid only when complete.

They are `torch.distributed.checkpoint` folders with canonical names, so any layout loads what
another saved. The learning rate, randomness and the batches follow from the step, so weights,
moments and the step are enough to resume a run. Copies in memory may be newer (`step_copies.py`),
and copies in further places may be all that is left (`further_places.py`).
"""

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.optim import Optimizer

from pipelines.core.errors import SharedError, UnreachableError, UserError, one_line
from pipelines.parallel.mesh import group_timeout
from pipelines.parallel.parallelize import Parallelized
from pipelines.parallel.process_group import from_one, one_for_all
from pipelines.training.checkpoint.dcp_files import (
    CheckpointReader,
    CheckpointWriter,
    SameModelPlanner,
)
from pipelines.training.checkpoint.further_places import FurtherPlace
from pipelines.training.checkpoint.patience import (
    RETRY_S,
    Patience,
    UnsavedError,
    is_away,
    unsaved,
)
from pipelines.training.checkpoint.state import HostStager, make_moments, state_of
from pipelines.training.checkpoint.step_copies import StepCopies
from pipelines.training.checkpoint.store import FIX, CheckpointStore
from pipelines.training.hooks import Events

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """The progress of a run."""

    step: int = 0  # optimizer steps done
    seconds: float = 0.0  # spent in them


class Stateful(Protocol):
    """Another object with a state that JSON can hold, such as a loss scale."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state."""


class _Writing(NamedTuple):
    """A checkpoint that is being written."""

    step: int
    written: Future[Any]
    losses: list[float]  # since the previous checkpoint
    writer: CheckpointWriter


class _Saved(NamedTuple):
    """A complete checkpoint."""

    facts: dict[str, Any]
    url: str


# What a process may ask of all processes: to look at a failed save, or to try to save again.
SaveRequest = Literal["look", "retry"]


class Checkpoints:
    """Saves and restores a run; every process makes one, and all call the same methods.

    The end of a `with Checkpoints(...)` block waits for the last save. A save that fails for a
    reason that may pass, such as a full disk, is tried again while training goes on.

    Attributes:
        newest: The step of the last checkpoint that was saved or restored.
        last_write: The step of the last save, and the seconds a GiB of this process's file.
        before_complete: Called before a checkpoint counts, on the first process, in a thread.
        further: Places to which this process, the first, copies complete checkpoints.
    """

    def __init__(
        self,
        store: CheckpointStore,
        model: Parallelized,
        optimizer: Optimizer,
        others: Mapping[str, Stateful] | None = None,
        keep: int = 2,
        keep_best: bool = False,
        patience: Patience | None = None,
        copy_every: int = 0,
    ) -> None:
        """Set up what to save and where.

        Args:
            store: The place for checkpoints; `claim` was already called on it.
            model: Its trained weights are saved.
            optimizer: Its moments are saved.
            others: Further small states by name, the same in all processes.
            keep: The number of newest checkpoints to keep.
            keep_best: Whether to keep the checkpoint with the lowest loss, too.
            patience: Decides how long failed saves are tolerated.
            copy_every: Steps between copies in memory; 0: none.
        """
        self._store = store
        self._model = model
        self._optimizer = optimizer
        self._others = others or {}
        self._keep = keep
        self._keep_best = keep_best
        self._patience = patience or Patience(1, Events())
        # A separate group: the saving thread must not interfere with the training's collectives,
        # and NCCL can't send the Python objects that are exchanged here.
        self._group = None
        if dist.is_initialized():
            timeout = group_timeout(model.mesh.stall_seconds)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._is_first = self._group is None or dist.get_rank() == 0
        self._stager = HostStager(model.mesh.device)
        self._copies = None
        if copy_every:
            self._copies = StepCopies(store, model, optimizer, copy_every, self._group)
        self._writing: _Writing | None = None
        self._losses: list[float] = []
        self.newest = 0
        self.last_write: tuple[int, float] | None = None
        self.before_complete: Callable[[], object] = lambda: None
        self.further: Sequence[FurtherPlace] = ()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def note(self, loss: float) -> None:
        """Note a loss of the curve; checkpoints are compared by the mean since the last one."""
        self._losses.append(loss)

    def save(self, position: Position) -> None:
        """Begin to write a checkpoint; `before_update` waits until training may go on.

        Raises:
            UserError: the previous checkpoint could not be written, and waiting does not help.
        """
        self._settle(position.step)
        self._begin(position)

    def copy(self, position: Position) -> None:
        """Begin to copy the state in memory if that is due; `before_update` waits, too."""
        if self._copies is not None and position.step % self._copies.every == 0:
            losses = [*self._losses]  # written while more of them are noted
            self._copies.copy(position.step, self._facts(position) | {"losses": losses})

    def before_sums(self, step: int) -> None:
        """Wait, before this process's part in the sums of a step (from 0), for a copy.

        Until the last copy is written, no process may complete the step after which the next one is
        made.
        """
        if self._copies is not None and (step + 1) % self._copies.every == 0:
            self._copies.wait()

    def save_now(self, position: Position, *, is_good: bool) -> bool:
        """Wait for the last save before an early end, and save this step too if it is good.

        Returns:
            Whether there is a checkpoint of this step.
        """
        try:
            self._settle(position.step)
            if is_good and self.newest < position.step:
                self._begin(position)
                self._settle(position.step)
        except UserError as error:
            _log.error("%s", error)
        if is_saved := self.newest == position.step:
            self._clear_copies()
        return is_saved

    def finish(self, position: Position) -> None:
        """Wait at the end of a run until its last checkpoint is complete.

        Raises:
            UserError: it can't be written, and waiting did not help.
        """
        while not self._settle(position.step, last=True):
            time.sleep(RETRY_S)
            self._begin(position)
        self._clear_copies()

    def finish_further(self) -> None:
        """Wait for the copies in further places, once the run has its model; the first one's."""
        for place in self.further:
            place.finish()
        if self.further:
            self._store.prune(self._keep, self._keep_best)  # what was kept for a copy

    def _clear_copies(self) -> None:
        if self._copies is not None:
            self._copies.clear()

    @property
    def request(self) -> SaveRequest | None:
        """This process's request to all processes, if any; nobody waits for the answer."""
        if self._writing is not None:
            written = self._writing.written
            return "look" if written.done() and written.exception() else None
        return "retry" if self._is_first and self._patience.retry_is_due else None

    def answer(self, requests: set[SaveRequest], position: Position) -> None:
        """Do what some process requests; all call it after the same step with all requests.

        Raises:
            UserError: a checkpoint could not be written, and waiting does not help.
        """
        if "look" in requests:
            self._settle(position.step)
        elif "retry" in requests:
            self._begin(position)

    def before_update(self) -> None:
        """Wait before weights or moments change, as the last save may still be copying them."""
        self._stager.before_update()
        if self._copies is not None:
            self._copies.before_update()

    def wait(self) -> None:
        """Wait until the last save is complete.

        Raises:
            UserError: it could not be written.
        """
        if self._writing is None:
            return
        save, self._writing = self._writing, None
        try:
            save.written.result()
        except CheckpointException as error:
            self._losses = save.losses + self._losses
            told = unsaved(self._store.url(save.step), _first_cause(error))  # while it is full
            self._discard(save.step)
            raise told from error
        self.newest = save.step
        self.last_write = save.step, save.writer.seconds_a_gib
        self._patience.saved(save.step)

    def _facts(self, position: Position) -> dict[str, Any]:
        states = {name: each.state_dict() for name, each in self._others.items()}
        return asdict(position) | {"others": states}

    def _begin(self, position: Position) -> None:
        losses, self._losses = self._losses, []
        facts = self._facts(position)
        facts["loss"] = sum(losses) / len(losses) if losses else None

        def complete() -> None:
            self.before_complete()
            self._store.complete(position.step, facts)
            held = [step for place in self.further if (step := place.copying) is not None]
            self._store.prune(self._keep, self._keep_best, held)
            self._look_further()

        writer = CheckpointWriter(
            self._store.url(position.step), lambda: self._store.remove(position.step), complete
        )
        begun: Any = async_save(
            {**state_of(self._model, self._optimizer)},
            storage_writer=writer,
            async_stager=self._stager,
            process_group=self._group,
            no_dist=self._group is None,
        )
        self._writing = _Writing(position.step, begun.upload_completion, losses, writer)

    def _settle(self, step: int, *, last: bool = False) -> bool:
        """Wait for the last save, and return whether it is complete.

        Raises:
            UserError: saves failed for too long, or this one can never be written.
        """
        try:
            self.wait()
        except UnsavedError as error:
            self._patience.failed(step, error)
            if from_one(lambda: self._patience.is_spent(step, last=last), self._group):
                raise
            return False
        return True

    def _discard(self, step: int) -> None:
        """Remove the files of a failed save, as the next save needs the space."""
        if self._is_first:
            with suppress(OSError, UserError):
                self._store.remove(step)

    def resume(self) -> Position:
        """Load the newest state, and return the run's position; it may lie in memory.

        Raises:
            UserError: as `restore`; or there is too little memory for copies.
        """
        position = self._resume()
        self._look_further()  # what was cut off
        return position

    def _look_further(self) -> None:
        for place in self.further:
            place.look()

    def _resume(self) -> Position:
        if self._copies is None:
            return self.restore()
        with one_for_all():
            self._copies.check()
        found = self._copies.newest(from_one(self._store.start, self._group))
        saved = from_one(self._newest, self._group)
        if found is None or (saved is not None and saved.facts["step"] >= found.of.step):
            return self.restore()
        facts = self._copies.load(found)
        self._losses = facts["losses"]
        self._load_others(facts, "its copy in memory")
        self._copies.begin(found)
        _log.info("resumed after step %d from memory", facts["step"])
        return Position(facts["step"], facts["seconds"])

    def restore(self) -> Position:
        """Load the newest complete checkpoint of all places; return the run's position in it.

        Raises:
            UserError: the checkpoint is damaged, or belongs to another model.
        """
        if self._copies is not None:
            self._copies.begin(None)
        with suppress(UnsavedError):  # the run goes on from the previous checkpoint
            self.wait()
        self._losses.clear()  # of steps that a run repeats after it went back
        saved = from_one(self._newest, self._group)
        if saved is None:
            return Position()
        facts, url = saved
        position = Position(facts["step"], facts["seconds"])
        self.newest = position.step
        make_moments(self._optimizer)
        try:
            load(
                {**state_of(self._model, self._optimizer)},
                storage_reader=CheckpointReader(url),
                planner=SameModelPlanner(),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as error:
            cause = _first_cause(error)
            kind = UnreachableError if is_away(url, cause) else SharedError
            raise kind(f"{url}: the checkpoint can't be loaded: {one_line(cause)}") from error
        self._load_others(facts, url)
        _log.info("resumed after step %d from %s", position.step, url)
        return position

    def _load_others(self, facts: dict[str, Any], place: str) -> None:
        for name, each in self._others.items():
            try:
                each.load_state_dict(facts["others"][name])
            except (KeyError, TypeError, ValueError) as error:
                raise SharedError(f"{place}: its state of {name} is damaged; {FIX}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Wait for the last save; if training failed, a failed save is only logged."""
        try:
            self.wait()
        except UserError as unwritten:
            if error is None:
                raise
            _log.error("%s", unwritten)
        finally:
            self._stager.close()
            if self._copies is not None:
                self._copies.close()
            if error is not None:
                for place in self.further:
                    place.close()
            if self._group is not None:
                dist.destroy_process_group(self._group)

    def _newest(self) -> _Saved | None:
        """Return the newest one; one process looks, as others may not see S3's or NFS's yet."""
        step, store = max(self._store.steps(), default=0), self._store
        for place in self.further:
            try:
                if (copied := place.newest()) > step:
                    step, store = copied, place.store
            except UserError as error:
                if not step:
                    raise
                _log.warning("%s; the run goes on from %s", error, store.url(step))
        return _Saved(store.facts(step), store.url(step)) if step else None


def _first_cause(error: CheckpointException) -> BaseException:
    """Return the error of the first failed process; all processes get the same one."""
    cause: BaseException = next(iter(error.failures.values()))[0]
    return cause
