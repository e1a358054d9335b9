"""Checkpoints of a training run: written beside training, counted only once they are whole.

They are `torch.distributed.checkpoint` folders under canonical names, so any layout loads what any
other saved. The learning rate, randomness and the batches follow from the step: with weights,
moments and the step a run is whole.
"""

import logging
import time
import warnings
from collections.abc import Mapping
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

from pipelines.core.errors import SharedError, UnreachableError, UserError
from pipelines.parallel.parallelize import Parallelized
from pipelines.parallel.process_group import one_for_all
from pipelines.training.checkpoint.dcp_files import (
    CheckpointReader,
    CheckpointWriter,
    SameModelPlanner,
)
from pipelines.training.checkpoint.patience import (
    RETRY_S,
    Patience,
    UnsavedError,
    in_one_line,
    is_away,
    unsaved,
)
from pipelines.training.checkpoint.state import HostStager, make_moments, state_of
from pipelines.training.checkpoint.store import CheckpointStore
from pipelines.training.events import Events

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """How far a run is."""

    step: int = 0  # optimizer steps done
    seconds: float = 0.0  # spent in them


class Stateful(Protocol):
    """What else has a state, such as a loss scale; JSON has types for all of it."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state."""


class _Writing(NamedTuple):
    """A checkpoint that is being written."""

    step: int
    written: Future[Any]
    losses: list[float]  # since the checkpoint before it


# What a process may want of all of them: to look at a save that failed, or to try one again.
SaveRequest = Literal["look", "retry"]


class Checkpoints:
    """Saves and restores a run; every process makes one and calls its methods alike.

    `with Checkpoints(...)`: the last save is waited for at the end. A save that fails for a reason
    that may pass, such as a full disk, is tried again, and training goes on meanwhile.

    Attributes:
        newest: The step of the last checkpoint that was saved or restored.
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
    ) -> None:
        """Take what is saved.

        Args:
            store: Where to; `claim` was called on it.
            model: Its trained weights.
            optimizer: Its moments.
            others: Further small states by name, the same in all processes.
            keep: Newest checkpoints that are kept.
            keep_best: Keep the one of the least loss, too.
            patience: With saves that fail.
        """
        self._store = store
        self._model = model
        self._optimizer = optimizer
        self._others = others or {}
        self._keep = keep
        self._keep_best = keep_best
        self._patience = patience or Patience(1, Events())
        # Its own: the saving thread may not come between the training's collectives, and NCCL
        # can't carry what is agreed on here.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._is_first = self._group is None or dist.get_rank() == 0
        self._stager = HostStager(model.mesh.device)
        self._writing: _Writing | None = None
        self._losses: list[float] = []
        self.newest = 0
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def note(self, loss: float) -> None:
        """A point of the training curve; checkpoints are compared by the mean since the last."""
        self._losses.append(loss)

    def save(self, position: Position) -> None:
        """Begin to write a checkpoint; `before_update` tells when training may go on.

        Raises:
            UserError: the checkpoint before this one could not be written, and waiting is no use.
        """
        self._settle(position.step)
        self._begin(position)

    def save_now(self, position: Position, *, is_good: bool) -> bool:
        """Before the run ends early: wait for the last save, and write what is good and not saved.

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
        return self.newest == position.step

    def finish(self, position: Position) -> None:
        """Wait at the end of a run until its last checkpoint is whole.

        Raises:
            UserError: it can't be written, and waiting was no use.
        """
        while not self._settle(position.step):
            time.sleep(RETRY_S)
            self._begin(position)

    @property
    def request(self) -> SaveRequest | None:
        """What this process wants of all; nobody waits for the answer."""
        if self._writing is not None:
            written = self._writing.written
            return "look" if written.done() and written.exception() else None
        return "retry" if self._is_first and self._patience.retry_is_due else None

    def answer(self, requests: set[SaveRequest], position: Position) -> None:
        """Do what some process wants; all call it after the same step, with all wishes.

        Raises:
            UserError: a checkpoint could not be written, and waiting is no use.
        """
        if "look" in requests:
            self._settle(position.step)
        elif "retry" in requests:
            self._begin(position)

    def before_update(self) -> None:
        """Call it before weights or moments change: the last save may still be copying them."""
        self._stager.before_update()

    def wait(self) -> None:
        """Until the last save is whole.

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
            self._discard(save.step)
            raise unsaved(self._store.url(save.step), _first_cause(error)) from error
        self.newest = save.step
        self._patience.saved(save.step)

    def _begin(self, position: Position) -> None:
        losses, self._losses = self._losses, []
        facts = asdict(position) | {
            "loss": sum(losses) / len(losses) if losses else None,
            "others": {name: each.state_dict() for name, each in self._others.items()},
        }

        def complete() -> None:
            self._store.complete(position.step, facts)
            self._store.prune(self._keep, self._keep_best)

        begun: Any = async_save(
            {**state_of(self._model, self._optimizer)},
            storage_writer=CheckpointWriter(
                self._store.url(position.step),
                lambda: self._store.remove(position.step),
                complete,
            ),
            async_stager=self._stager,
            process_group=self._group,
            no_dist=self._group is None,
        )
        self._writing = _Writing(position.step, begun.upload_completion, losses)

    def _settle(self, step: int) -> bool:
        """Wait for the last save; whether it is whole. One that failed is put up with for a time.

        Raises:
            UserError: for no longer, or it will never be written.
        """
        try:
            self.wait()
        except UnsavedError as error:
            self._patience.failed(step, error)
            if self._from_first(lambda: self._patience.is_spent(step)):
                raise
            return False
        return True

    def _discard(self, step: int) -> None:
        """What a save that failed left takes room that the next one needs."""
        if self._is_first:
            with suppress(OSError, UserError):
                self._store.remove(step)

    def restore(self) -> Position:
        """Put the newest complete checkpoint in place, and return where the run was.

        Raises:
            UserError: it is damaged, or of another model.
        """
        with suppress(UnsavedError):  # the run goes on from the one before it
            self.wait()
        self._losses.clear()  # of steps that a run which goes back makes again
        facts = self._from_first(self._newest)
        if facts is None:
            return Position()
        position = Position(facts["step"], facts["seconds"])
        self.newest = position.step
        url = self._store.url(position.step)
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
            raise kind(f"{url}: the checkpoint can't be loaded: {in_one_line(cause)}") from error
        for name, each in self._others.items():
            each.load_state_dict(facts["others"][name])
        _log.info("resumed after step %d from %s", position.step, url)
        return position

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Wait for the last save; where training failed, that is what is told."""
        try:
            self.wait()
        except UserError as unwritten:
            if error is None:
                raise
            _log.error("%s", unwritten)
        finally:
            self._stager.close()
            if self._group is not None:
                dist.destroy_process_group(self._group)

    def _newest(self) -> dict[str, Any] | None:
        steps = self._store.steps()
        return self._store.facts(steps[-1]) if steps else None

    def _from_first(self, look: Any) -> Any:
        """What the first process sees: another may not see yet what S3 or NFS has."""
        if self._group is None:
            return look()
        with one_for_all():
            found = [look() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found, src=0, group=self._group)
        return found[0]


def _first_cause(error: CheckpointException) -> BaseException:
    """The first process's trouble; every process has it."""
    cause: BaseException = next(iter(error.failures.values()))[0]
    return cause
