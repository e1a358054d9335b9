"""Copies of a run's state in its machines' memory, from which it goes on after a process dies.

Every few steps each process writes its weights and moments to a file in its machine's memory, which
outlives it. Replicas hold equal parts of the state and write equal files, so that a new machine
gets its part from another one. A step counts if each part of its state has a file.

After a death there is always one that counts: a process takes part in the sums of a step that is
copied once its file of the one before is whole, and keeps the file before until it has written the
next. A third file takes turns with these two, as new content goes faster to memory that a file
already has.

The steps since a run last began are a *start*. Its number lies with the checkpoints, so that files
of another start count only at the step from which this one went on.
"""

import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from pipelines.core.errors import UserError
from pipelines.core.machine import memory_bytes
from pipelines.models.safetensors_files import write_one_by_one
from pipelines.models.weights import local
from pipelines.parallel.parallelize import Parallelized
from pipelines.parallel.process_group import from_all, from_one, one_for_all
from pipelines.training.checkpoint.state import HostStager, State, make_moments, state_of
from pipelines.training.checkpoint.store import CheckpointStore, Start

MEMORY = Path("/dev/shm")  # noqa: S108 (what is made in it can be read by this user only)
STALE_S = 3600.0  # after which the files of a run that nobody goes on with are deleted
_TIMES = 4  # the state, at most: on its way, two files, and one that is being written
_SUFFIX = ".safetensors"
_UNFINISHED = ".unfinished"
_HEADER = 200  # bytes for a tensor's type, shape and place in a file's header

_log = logging.getLogger(__name__)


class _Step(NamedTuple):
    """A step of a start."""

    step: int
    start: str


class Found(NamedTuple):
    """A step that counts."""

    of: _Step
    sources: list[int]  # which rank has the file of each rank's part; itself where it can


class _File(NamedTuple):
    """A file of a process's part."""

    of: _Step
    part: str
    path: Path


class StepCopies:
    """The copies of one run; every process makes one, and all call the same methods."""

    def __init__(
        self,
        store: CheckpointStore,
        model: Parallelized,
        optimizer: Optimizer,
        every: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Set up what to copy; nothing is written yet.

        Args:
            store: The place of the run's checkpoints.
            model: Its trained weights are copied.
            optimizer: Its moments are copied.
            every: Steps between copies.
            group: A gloo group of all processes; None with one process.
        """
        self.every = every
        self._store = store
        self._model, self._optimizer = model, optimizer
        self._group = group
        self._stager = HostStager(model.mesh.device)
        self._pool = ThreadPoolExecutor(1, "step-copies")
        self._written: tuple[int, Future[None]] | None = None
        place = hashlib.sha256(store.url(0).encode()).hexdigest()[:16]
        self._folder = MEMORY / f"penstock-{os.getuid()}" / place
        self._before: _Step | None = None  # the step of the last copy
        self._start = ""
        self._rank = dist.get_rank() if group is not None else 0
        self._part = _part(model, optimizer)
        self._unfinished = self._folder / f"{self._rank}{_UNFINISHED}"
        self._parts: list[str] = []  # of each process, once files were looked for

    def check(self) -> None:
        """Delete what other runs left here, and look whether there is room.

        Raises:
            UserError: there is too little memory, or the folder is another user's.
        """
        if not MEMORY.is_dir():
            raise UserError(f"train.copy_every: this machine has no {MEMORY}; set 0")
        self._folder.parent.mkdir(mode=0o700, exist_ok=True)
        if self._folder.parent.stat().st_uid != os.getuid():
            raise UserError(f"train.copy_every: {self._folder.parent} is another user's")
        for each in self._folder.parent.iterdir():
            with suppress(FileNotFoundError):
                if each != self._folder and time.time() - each.stat().st_mtime > STALE_S:
                    shutil.rmtree(each, ignore_errors=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        weights = sum(local(each).nbytes for each in self._model.changed().values())
        moments = sum(2 * local(each).nbytes for each in self._model.trained().values())
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        needed = _TIMES * here * (weights + moments)
        found = min(shutil.disk_usage(MEMORY).free, memory_bytes()[1])
        found += sum(each.stat().st_size for each in self._folder.iterdir())
        if needed > found:
            raise UserError(
                f"train.copy_every = {self.every} takes up to {needed / 2**30:.1f} GiB of this "
                f"machine's memory for {here} processes, but {MEMORY} has {found / 2**30:.1f} GiB "
                "left; set 0, or use more machines"
            )

    def newest(self, start: Start | None) -> Found | None:
        """Return the newest step that counts; all processes call it."""
        if start is None:
            return None
        mine = self._part, {(each.of, each.part) for each in self._files()}
        everyone: list[tuple[str, set[tuple[_Step, str]]]] = from_all(mine)
        self._parts = [part for part, _ in everyone]
        steps = {of for _, files in everyone for of, _ in files}
        for of in sorted(steps, reverse=True):
            if of.start != start.name and of != (start.step, start.after):
                continue
            have = [{part for each, part in files if each == of} for _, files in everyone]
            sources = [_source(rank, part, have) for rank, part in enumerate(self._parts)]
            if None not in sources:
                return Found(of, [each for each in sources if each is not None])
        return None

    def load(self, found: Found) -> dict[str, Any]:
        """Load a step, and return the facts it was copied with; all processes call it."""
        make_moments(self._optimizer)
        state = {n: local(each) for n, each in state_of(self._model, self._optimizer).items()}
        for to, source in enumerate(found.sources):
            if self._rank == source:
                with self._opened(found, to) as file:
                    for name in sorted(file.keys()):
                        tensor = file.get_tensor(name)
                        if to == source:
                            state[name].copy_(tensor)
                        elif tensor.numel():
                            dist.send(_bytes(tensor), to, self._group)
            elif self._rank == to:
                for tensor in (state[name] for name in sorted(state)):
                    arrived = torch.empty(tensor.shape, dtype=tensor.dtype)
                    if arrived.numel():
                        dist.recv(_bytes(arrived), source, self._group)
                    tensor.copy_(arrived)
        return from_one(lambda: self._facts(found), self._group, found.sources[0])

    def begin(self, after: Found | None) -> None:
        """Begin a start after a step that was loaded, or from elsewhere; all processes call it."""
        self.wait()
        self._start = from_one(lambda: secrets.token_hex(4), self._group)
        self._before = after and after.of
        step, name = self._before or (0, "")
        with one_for_all():
            if self._rank == 0:
                self._store.begin(Start(name=self._start, step=step, after=name))
        for each in self._files():
            if each.of != self._before:
                each.path.unlink(missing_ok=True)
        for path in self._folder.glob(f"*{_UNFINISHED}"):  # of a process that was killed
            path.unlink(missing_ok=True)

    def copy(self, step: int, facts: dict[str, Any]) -> None:
        """Begin to write a copy; `before_update` waits until the state may change."""
        self.wait()
        state = state_of(self._model, self._optimizer)
        of, staged = _Step(step, self._start), self._stager.stage(state)
        self._written = step, self._pool.submit(self._write, of, facts, staged)

    def before_update(self) -> None:
        """Wait before weights or moments change, as they may still be on their way."""
        self._stager.before_update()

    def wait(self) -> None:
        """Wait until the last copy is written; one that could not be is only logged."""
        if self._written is None:
            return
        (step, written), self._written = self._written, None
        try:
            written.result()
        except OSError as error:
            what = "no copy of step %d (%s): if a process dies now, the run goes on from before it"
            _log.warning(what, step, error.strerror)

    def clear(self) -> None:
        """Delete the files on this machine, as a checkpoint holds the run's last step."""
        self.wait()
        for path in (*self._folder.glob(f"*{_SUFFIX}"), self._unfinished):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # another process's file is in it
            self._folder.rmdir()

    def close(self) -> None:
        """End the threads; files stay."""
        self._pool.shutdown()
        self._stager.close()

    def _write(self, of: _Step, facts: dict[str, Any], staged: Future[State]) -> None:
        state = {name: local(each) for name, each in staged.result().items()}
        mine = f"-{self._part}-{self._rank}{_SUFFIX}"
        path, unfinished = self._folder / f"{of.step}-{of.start}{mine}", self._unfinished
        room = sum(len(name) + _HEADER for name in state)
        try:
            write_one_by_one(unfinished, state.items(), {"facts": json.dumps(facts)}, room)
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        for each in self._files():
            if each.of in (of, self._before):
                continue
            if each.path.name.endswith(mine):
                each.path.replace(unfinished)
            elif each.of.start != self._start:  # of a process that may be gone
                each.path.unlink(missing_ok=True)
        self._before = of

    def _files(self) -> list[_File]:
        """Return the complete files on this machine."""
        found = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            step, start, part, _ = path.stem.split("-")
            found.append(_File(_Step(int(step), start), part, path))
        return found

    def _opened(self, found: Found, rank: int) -> Any:
        """Open the file of `rank`'s part, which is on this machine."""
        wanted = found.of, self._parts[rank]
        return safe_open(next(each.path for each in self._files() if each[:2] == wanted), "pt")

    def _facts(self, found: Found) -> dict[str, Any]:
        with self._opened(found, 0) as file:
            facts: dict[str, Any] = json.loads(file.metadata()["facts"])
            return facts


def _part(model: Parallelized, optimizer: Optimizer) -> str:
    """Return a hash that is equal for processes which hold equal parts of the state."""
    told = [(name, *_described(each)) for name, each in model.changed().items()]
    groups = optimizer.param_groups  # ZeRO 1 divides moments, but not weights
    told += [("", *_described(each)) for group in groups for each in group["params"]]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _source(rank: int, part: str, have: list[set[str]]) -> int | None:
    """Return the process whose machine has a part: itself where it can be, None where none has."""
    if part in have[rank]:
        return rank
    return next((other for other, parts in enumerate(have) if part in parts), None)


def _described(tensor: Tensor) -> tuple[Any, ...]:
    """Return what of a tensor is here."""
    where: Any = ()
    if isinstance(tensor, DTensor):
        placed = tensor.shape, tensor.device_mesh, tensor.placements
        where = compute_local_shape_and_global_offset(*placed)
    return str(tensor.dtype), list(tensor.shape), where


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
