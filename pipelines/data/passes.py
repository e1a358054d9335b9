"""Passes over blocks: an ordered map whose finished tasks outlast a killed worker or run.

A task writes its bulk data into a folder of its own and returns a small result. The folder appears
under its final name, whole and with the result in it, once the task has returned: a task that is
tried twice does no harm, and a later run of the same work takes the folder as it is.

The seam between what a stage does and where it runs: an ordered map.

A stage asks for `map_ordered(function, items)` and never learns whether the calls ran here or on a
cluster. `ray_jobs.ray_map` gives the same results in the same order from any number of workers.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from pydantic import TypeAdapter

from pipelines.core.storage import read_json, write_json
from pipelines.run.progress import ProgressWriter

T = TypeVar("T")
R = TypeVar("R")


class MapOrdered(Protocol):
    """Calls a picklable function on each item and yields the results in the items' order."""

    def __call__(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """Results may be computed ahead; a caller that stops early cancels the rest."""
        ...


def map_in_process(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Run each call here, when its result is asked for."""
    return map(function, items)


LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES = 1 << 20, 64 << 20
_BLOCKS = 64  # that a corpus between these limits is cut into
RESULT = "result.json"  # in a task's folder, beside its data
_KEY = "key.json"  # of the work, in the folder that holds the passes

_log = logging.getLogger(__name__)

# What a pass does with an item: fill the empty folder, return what the driver must know. It depends
# on the item alone, so that any try gives the same bytes.
Task = Callable[[T, Path], R]


def block_bytes(total: int) -> int:
    """About how much data is one task's work: depends on the corpus alone, not on the workers."""
    return min(max(total // _BLOCKS, LEAST_BLOCK_BYTES), MOST_BLOCK_BYTES)


class Sized(Protocol):
    """What knows how large it is."""

    @property
    def bytes(self) -> int: ...  # noqa: D102


def mebibytes(item: Sized) -> float:
    """Return how large an item is, as `Passes.run` weighs it."""
    return item.bytes / (1 << 20)


class Passes:
    """Runs the passes of one work in its folder, `<work>/<pass>/<item number>/`."""

    def __init__(
        self, work: Path, map_ordered: MapOrdered, new_progress: Callable[[], ProgressWriter]
    ) -> None:
        self._work = work
        self._map_ordered = map_ordered
        self._new_progress = new_progress

    def run(
        self,
        name: str,
        task: Task[T, R],
        items: Sequence[T],
        result: type[R],
        unit: str,
        weigh: Callable[[T], float] = lambda _: 1,
    ) -> Iterator[tuple[Path, R]]:
        """Yield each task's folder and result, in the items' order; what is finished is not done
        again.

        Args:
            name: of the pass; with the item's number it names the task, so the items of a pass
                must be the same in each run of the same work.
            task: picklable, as its items are.
            items: in order.
            result: the type of the results, one that pydantic reads back from JSON.
            unit: of the progress lines, such as "MiB read".
            weigh: how many units an item is.
        """
        if not items:
            return
        (parent := self._work / name).mkdir(parents=True, exist_ok=True)
        folders = [parent / f"{number:05d}" for number in range(len(items))]
        sizes = dict(zip(folders, map(weigh, items), strict=True))
        # Listed, as a network file system may go on denying a name that was asked for too early.
        if known := set(parent.iterdir()) & set(folders):
            _log.info("%s: %d of %d tasks are done already", name, len(known), len(folders))
        done, total = sum(sizes[folder] for folder in known), sum(sizes.values())
        progress = self._new_progress()
        progress.write(done, total, unit)
        missing = [pair for pair in zip(items, folders, strict=True) if pair[1] not in known]
        made = self._map_ordered(_InFolder(task, result), missing)
        for folder in folders:
            if folder in known:
                yield folder, TypeAdapter(result).validate_python(read_json(folder / RESULT))
            else:
                found = next(made)
                done += sizes[folder]
                progress.write(done, total, unit, force=folder is folders[-1])
                yield folder, found


@dataclass(frozen=True)
class _InFolder(Generic[T, R]):
    """Calls a task for an item and the folder that is to hold its data."""

    task: Task[T, R]
    result: type[R]

    def __call__(self, pair: tuple[T, Path]) -> R:
        item, folder = pair
        with _whole(folder) as unfinished:
            made = self.task(item, unfinished)
            write_json(unfinished / RESULT, TypeAdapter(self.result).dump_python(made, mode="json"))
        return made


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """An empty folder that becomes `folder` when the block ends without an error."""
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        yield unfinished
        for path in unfinished.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # after a power cut, too, a folder is whole or absent
        try:
            unfinished.rename(folder)
        except OSError:  # another try of this task, taken for dead, was first: the same bytes
            if not (folder / RESULT).is_file():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def work_folder(folder: Path, key: str | None) -> Iterator[Path]:
    """Yield the folder of a work's passes; it is removed when the block ends without an error.

    What an earlier try left there stays where its key is this one's; None is nobody's key.
    """
    kept = folder / _KEY
    if key is None or not kept.is_file() or read_json(kept) != key:
        _remove(folder)
        write_json(kept, key)
    yield folder
    _remove(folder)


def _remove(folder: Path) -> None:
    """The key first: what is left by a removal that was killed is nobody's work."""
    (folder / _KEY).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
