"""Checkpoints of a training run: written beside training, counted only once they are whole.

They are `torch.distributed.checkpoint` folders under canonical names, so any layout loads what any
other saved. The learning rate, randomness and the batches follow from the step: with weights,
moments and the step a run is whole.
"""

import hashlib
import json
import logging
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.optim import Optimizer

from pipelines.core.errors import SharedError, UnreachableError, UserError
from pipelines.core.recipe import Recipe
from pipelines.core.records import DatasetRef
from pipelines.distributed.process_group import one_for_all
from pipelines.models.folder import fingerprint
from pipelines.models.parallelize import Parallelized
from pipelines.training.checkpoint_planner import SameModelPlanner
from pipelines.training.checkpoint_reader import CheckpointReader
from pipelines.training.checkpoint_state import HostStager, make_moments, state_of
from pipelines.training.checkpoint_store import CheckpointStore
from pipelines.training.checkpoint_writer import CheckpointWriter

_log = logging.getLogger(__name__)

# What neither changes the samples of a step nor what is computed of them, but for the order of
# sums; with other values of these a run goes on. A key that is not named here begins anew.
_MAY_CHANGE = (
    "name",
    "description",
    "validation",
    "parallel",
    "evaluate",
    "register",
    "resources",
    "data.reader",
    "train.max_seconds",
    "train.micro_batch_size",
    "train.activation_checkpoint",
    "train.compile",
    "train.checkpoints",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.keep_best",
    "train.log_every",
    "train.max_rollbacks",
    "train.stall_seconds",
    "train.profile_steps",
)


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


def identity(recipe: Recipe, dataset: DatasetRef) -> str:
    """A hash of what a run's weights follow from: with the same one it can be resumed.

    The layout is not in it, nor are the number of processes or how the work is cut. The weights
    that the run starts from are: a checkpoint of adapters is of no use on another base.
    """
    values = recipe.to_dict()
    for name in _MAY_CHANGE:
        section, _, key = name.rpartition(".")
        del (values[section] if section else values)[key]
    starts = (recipe.model.init_from, recipe.adapter.init_from)
    weights = [folder and fingerprint(Path(folder)) for folder in starts]
    text = json.dumps([values, dataset.model_dump(mode="json"), weights], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Checkpoints:
    """Saves and restores a run; every process makes one and calls its methods alike.

    `with Checkpoints(...)`: the last save is waited for at the end.
    """

    def __init__(
        self,
        store: CheckpointStore,
        model: Parallelized,
        optimizer: Optimizer,
        others: Mapping[str, Stateful] | None = None,
        keep: int = 2,
        keep_best: bool = False,
    ) -> None:
        """Take what is saved.

        Args:
            store: Where to; `claim` was called on it.
            model: Its trained weights.
            optimizer: Its moments.
            others: Further small states by name, the same in all processes.
            keep: Newest checkpoints that are kept.
            keep_best: Keep the one of the least loss, too.
        """
        self._store = store
        self._model = model
        self._optimizer = optimizer
        self._others = others or {}
        self._keep = keep
        self._keep_best = keep_best
        # Its own: the saving thread may not come between the training's collectives, and NCCL
        # can't carry what is agreed on here.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._stager = HostStager(model.mesh.device)
        self._writing: tuple[int, Future[Any]] | None = None
        self._losses: list[float] = []
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def note(self, loss: float) -> None:
        """A point of the training curve; checkpoints are compared by the mean since the last."""
        self._losses.append(loss)

    def save(self, position: Position) -> None:
        """Begin to write a checkpoint; `before_update` tells when training may go on.

        Raises:
            UserError: the checkpoint before this one could not be written.
        """
        self.wait()
        facts = asdict(position) | {
            "loss": sum(self._losses) / len(self._losses) if self._losses else None,
            "others": {name: each.state_dict() for name, each in self._others.items()},
        }
        self._losses.clear()

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
        self._writing = position.step, begun.upload_completion

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
        (step, written), self._writing = self._writing, None
        try:
            written.result()
        except CheckpointException as error:
            unwritten = f"{self._store.url(step)}: the checkpoint can't be written"
            raise _failure(unwritten, error, "; the run goes on from the one before it") from error

    def restore(self) -> Position:
        """Put the newest complete checkpoint in place, and return where the run was.

        Raises:
            UserError: it is damaged, or of another model.
        """
        self.wait()
        self._losses.clear()  # of steps that a run which goes back makes again
        facts = self._from_first(self._newest)
        if facts is None:
            return Position()
        position = Position(facts["step"], facts["seconds"])
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
            raise _failure(f"{url}: the checkpoint can't be loaded", error) from error
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


def _failure(what: str, error: CheckpointException, then: str = "") -> UserError:
    """The first process's trouble, in one line, which every process has.

    What S3 refuses a person mends; any other trouble with it may pass.
    """
    first = next(iter(error.failures.values()))[0]
    reason = " ".join((str(first) or repr(first)).split())
    a_persons = isinstance(first, UserError | FileNotFoundError | PermissionError)
    passes = isinstance(first, UnreachableError) or ("s3://" in what and not a_persons)
    return (UnreachableError if passes else SharedError)(f"{what}: {reason}{then}")
