"""Refuses, when a run is prepared, what the places that it writes to have no right or room for.

How much a run will write is not known before; what is counted is the least, so that nothing is
refused that could end well.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.core.errors import UserError
from pipelines.core.formatting import size
from pipelines.core.settings import Settings, load_settings
from pipelines.core.writable_place import check_writable
from pipelines.datasets.datasets_probe import check_listings
from pipelines.datasets.versions import STREAMED, find
from pipelines.recipe.recipe import Recipe
from pipelines.registry.parents import Settled
from pipelines.registry.registry_probe import check_mlflow
from pipelines.stage_cache.dvc_cache import shares_blocks
from pipelines.stage_cache.open_workspace import STAGE_CACHE
from pipelines.stages.run_plan import shape_beforehand
from pipelines.training.checkpoint.store import CheckpointStore, place_of_run

_CHECKPOINT_BYTES = 12  # a parameter and AdamW's two moments, in fp32
_MODEL_BYTES = 4  # at most, for the parameters of the exported model
# Of an input's bytes: filters drop documents, and a record may have more than its text.
_LEAST_SHARE = 0.25


class Need(NamedTuple):
    """What a run will write to a folder."""

    folder: Path
    what: str
    bytes: float


def check_home(run: Settled) -> None:  # noqa: ARG001 (each run writes to the home)
    """Write to the home, to the folder of the workspaces and to the stage cache."""
    settings = load_settings()
    for folder in (settings.home, settings.runs, settings.home / STAGE_CACHE):
        fix = "fix its owner or rights, or set PENSTOCK_HOME to another place"
        check_writable(str(folder), "PENSTOCK_HOME", fix)


def check_checkpoints(run: Settled) -> None:
    """Write to the places of the checkpoints, other than the workspace."""
    train = run.ready.train
    places = [("train.checkpoints", train.checkpoints)]
    places += [("train.more_checkpoints", more.place) for more in train.more_checkpoints]
    for key, place in places:
        if place is not None:
            CheckpointStore(place_of_run(place, Path("penstock-probe"))).probe(key)


def check_disk(run: Settled) -> None:
    """Compare the free space of each disk with the least that the run will write to it."""
    by_disk: dict[int, list[Need]] = {}
    for need in _needs(run, load_settings()):
        if need.bytes:
            by_disk.setdefault(_existing(need.folder).stat().st_dev, []).append(need)
    if short := [told for needs in by_disk.values() if (told := _shortage(needs))]:
        raise UserError(
            f"{', and '.join(short)}; free some (`penstock gc` deletes old results), set "
            "PENSTOCK_HOME, train.checkpoints or train.more_checkpoints to another place, or lower "
            "train.keep_checkpoints"
        )


def _shortage(needs: Sequence[Need]) -> str | None:
    """Return what a disk has no room for, or None if it has."""
    needed, folder = sum(need.bytes for need in needs), needs[0].folder
    free = shutil.disk_usage(_existing(folder)).free
    if needed <= free:
        return None
    *others, last = (need.what for need in needs)
    what = f"{', '.join(others)} and {last}" if others else last
    return f"{folder} has {size(free)} free, but {what} take at least {size(needed)}"


def check_dataset_files(run: Settled) -> None:
    """Ask the remote for the files of the dataset versions that the run starts from."""
    if run.ready.data.source.is_published:
        versions = run.source.get("mixture", [run.source])
        check_listings(each["directory_hash"] for each in versions)


def check_tracking(run: Settled) -> None:
    """Ask MLflow's registry, and write to its artifact store."""
    check_mlflow(run.ready.name)


def _needs(run: Settled, settings: Settings) -> Iterator[Need]:
    recipe = run.ready
    data, parameters = _data_bytes(run), shape_beforehand(recipe).parameters
    yield Need(settings.runs, "the data", data)
    cache = settings.home / STAGE_CACHE
    if data and not (
        _seen_before(run.source, settings.runs) or shares_blocks(settings.runs, cache)
    ):
        yield Need(cache, "their copy in the stage cache", data)
    for place, number in _kept(recipe, settings):
        if recipe.adapter.kind == "none" and "://" not in place:
            what = f"{number} checkpoints"
            yield Need(Path(place), what, number * parameters * _CHECKPOINT_BYTES)
    yield Need(settings.runs, "the model", parameters * _MODEL_BYTES)


def _kept(recipe: Recipe, settings: Settings) -> Iterator[tuple[str, int]]:
    """Yield each place with the number of checkpoints that it has at most at a time."""
    # One is written before one is deleted.
    train = recipe.train
    yield train.checkpoints or str(settings.runs), train.keep_checkpoints + 1 + train.keep_best
    for more in train.more_checkpoints:
        copies = train.steps // max(more.every, train.checkpoint_every)
        yield more.place, min(more.keep + 1, copies)


def _data_bytes(run: Settled) -> float:
    """Return the least that the data take: what is published is known, text is not yet read."""
    data = run.ready.data
    if data.reader == STREAMED:
        return 0
    if data.source.is_published:
        labels = data.source.mixture or [str(data.source.path)]
        return sum(find(label).bytes for label in labels)
    if data.source.max_documents is not None:
        return 0
    inputs = run.source.get("source", {}).get("inputs", ())
    return _LEAST_SHARE * sum(found.get("bytes") or 0 for found in inputs)


def _seen_before(source: Mapping[str, Any], runs: Path) -> bool:
    """Return whether a run had this source before, so that the stage cache may have its data."""
    text = json.dumps(source, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    length = len(text.encode())
    for path in runs.glob("*/source.json"):
        with suppress(FileNotFoundError):  # `penstock gc` may delete a run meanwhile
            if path.stat().st_size == length and path.read_text(encoding="utf-8") == text:
                return True
    return False


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())
