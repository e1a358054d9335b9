"""Explains which stages a run would take from the stage cache, and why it would run the others.

The reason is a comparison with an earlier run in which the stage is done: the newest one with the
same recipe name, or else the newest of all.

A user can keep a stage's earlier result although its key has changed: `run --keep train --why`.

`kept.json` in the workspace records which result, from which run, who kept it, when and why, and
what had changed; a model's lineage records it, too.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipelines.core.checked_yaml import parse_yaml, read_yaml
from pipelines.core.errors import UserError
from pipelines.core.storage import md5, read_json, write_json
from pipelines.recipe.recipe_files import get_dotted
from pipelines.run.records import KEPT_FILE, RUN_FILE
from pipelines.run.usage import usage_of
from pipelines.run.workspace import Run
from pipelines.stage_cache import dvc_cache
from pipelines.stage_cache.fingerprint import CODE_FILE, StageCode, stage_codes

_CODE = {"functions", "packages"}
_FILES = {
    "source.json": "the content of the source",
    "previous.json": "the dataset version that validate compares with",
}


@dataclass(frozen=True)
class Forecast:
    """What a run will do with a stage.

    Attributes:
        cached: Whether its result comes from the cache; None if that depends on the output of an
            earlier stage that runs.
        because: The reasons why it would run, one a line.
        seconds: How long it would take; None if that is not known.
        cost: The cost in the recipe's currency; None if no price is set.
        told_by: Where the number of seconds comes from.
    """

    stage: str
    cached: bool | None
    because: tuple[str, ...] = ()
    seconds: float | None = None
    cost: float | None = None
    told_by: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the forecast as lines for a user."""
        match self.cached:
            case True:
                told = "comes from the cache"
            case None:
                told = "runs, unless the earlier stages give the same outputs as before"
            case False:
                told = "runs"
        if not self.cached and self.seconds is not None:
            told += f"; about {_duration(self.seconds)}, {self.told_by}"
            told += f"; costs about {self.cost:.2f}" if self.cost is not None else ""
        yield f"{self.stage:<10}  {told}"
        yield from (f"    {line}" for text in self.because for line in text.splitlines())


def explain(
    workspace: Path, runs: Path, planned: Mapping[str, Any] | None = None
) -> list[Forecast]:
    """Forecast each stage of a run that has not started.

    Args:
        workspace: The run's workspace.
        runs: The folder of all workspaces.
        planned: The run's plan, from `plan.json`.
    """
    found = []
    kept = dvc_cache.kept(workspace)
    codes: dict[Path, dict[str, StageCode]] = {}
    for stage, cached in dvc_cache.forecast(workspace).items():
        before = earlier_run(workspace, runs, stage)
        because: tuple[str, ...] = ()
        if told := kept.get(stage):
            because = (f"kept from {told['run']} for {told['who']}: {told['why']}",)
        elif cached is False:
            because = _why_it_runs(workspace, before, stage, codes)
        elif cached is None:
            because = tuple(reasons(workspace, before, stage, codes))
        found.append(Forecast(stage, cached, because, *_time(stage, planned, before)))
    return found


def explain_past(workspace: Path, runs: Path) -> list[Forecast]:
    """Return which stages ran, and why, in a run that has started or ended."""
    found = []
    codes: dict[Path, dict[str, StageCode]] = {}
    for stage in dvc_cache.stages(workspace):
        used = usage_of(workspace, stage)
        if not used.last:
            continue
        before = earlier_run(workspace, runs, stage)
        ran = used.seconds > 0
        because = _why_it_runs(workspace, before, stage, codes) if ran else ()
        found.append(
            Forecast(stage, not ran, because, used.seconds if ran else None, None, "measured")
        )
    return found


def _why_it_runs(
    workspace: Path, before: Path | None, stage: str, codes: dict[Path, dict[str, StageCode]]
) -> tuple[str, ...]:
    told = tuple(reasons(workspace, before, stage, codes))
    if told[-1].endswith(":"):
        told += ("only its input changed, or its result was deleted from the cache",)
    return told


def earlier_run(workspace: Path, runs: Path, stage: str) -> Path | None:
    """Return the workspace of the earlier run to compare with, in which the stage is done."""
    name, began = recipe_name(workspace), (workspace / RUN_FILE).stat().st_mtime
    ages = [
        ((lock.parent / RUN_FILE).stat().st_mtime, lock.parent) for lock in runs.glob("*/dvc.lock")
    ]
    newest: Path | None = None
    for age, each in sorted(ages, reverse=True):  # of thousands of runs a few are read
        if age >= began or each == workspace:
            continue
        if f"\n  {stage}:\n" in (each / "dvc.lock").read_text(encoding="utf-8"):
            if recipe_name(each) == name:
                return each
            newest = newest or each
    return newest


def recipe_name(workspace: Path) -> str | None:
    """Return the name of a run's recipe, of which nothing else is parsed: a home has many runs."""
    text = (workspace / "params.yaml").read_text(encoding="utf-8")
    line = re.search(r"^name:.*$", text, re.MULTILINE)  # keys further in are indented
    name: str | None = line and parse_yaml(line[0], "params.yaml")["name"]
    return name


def reasons(
    workspace: Path,
    before: Path | None,
    stage: str,
    codes: dict[Path, dict[str, StageCode]],
) -> Iterator[str]:
    """Yield the reasons why a stage's key differs from its key in an earlier run, one a line.

    Args:
        workspace: The run's workspace.
        before: The earlier run's workspace, if there is one.
        stage: The stage's name.
        codes: The stages' code by workspace, which is filled when it is needed.
    """
    said = dvc_cache.stages(workspace)[stage]
    if said.get("always_changed"):
        yield "this stage runs in every run"
        return
    if before is None:
        yield "there is no earlier run in which this stage is done"
        return
    yield f"compared with {Run.read(before).dag_run_id}:"
    was = dvc_cache.stages(before).get(stage, {})
    if said["cmd"] != was.get("cmd"):
        yield f"its command: {was.get('cmd')} -> {said['cmd']}"
    for dep in said["deps"]:
        if not dep.startswith("outputs/") and _md5(workspace / dep) != _md5(before / dep):
            yield f"{_FILES.get(dep, dep)} changed"
    for group in said["params"]:
        for file, keys in group.items():
            if file != CODE_FILE:
                yield from _changed_values(workspace / file, before / file, keys)
    yield from _changed_code(workspace, before, stage, codes)


def _md5(path: Path) -> str | None:
    return md5(path) if path.is_file() else None


def _changed_values(now: Path, before: Path, keys: list[str]) -> Iterator[str]:
    new, old = _values(now), _values(before)
    for key in keys:
        is_now, was = dict(_leaves(key, _get(new, key))), dict(_leaves(key, _get(old, key)))
        for name in sorted(is_now | was):
            if is_now.get(name) != was.get(name):
                yield f"{name}: {was.get(name, 'not set')} -> {is_now.get(name, 'not set')}"


def _values(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = read_json(path) if path.suffix == ".json" else read_yaml(path)
    values: dict[str, Any] = found
    return values


def _get(values: dict[str, Any], key: str) -> Any:
    try:
        return get_dotted(values, key)
    except KeyError:
        return None


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _leaves(f"{key}.{name}", each)
    else:
        yield key, value


def _changed_code(
    workspace: Path, before: Path, stage: str, codes: dict[Path, dict[str, StageCode]]
) -> Iterator[str]:
    keys = [_values(folder / CODE_FILE).get(stage, {}) for folder in (workspace, before)]
    changed = {part for part in _CODE if keys[0].get(part) != keys[1].get(part)}
    if not changed:
        return
    if not keys[1]:
        yield "that run has no fingerprint of the code, which Penstock did not keep then"
        return
    for folder in (workspace, before):
        if folder not in codes:
            codes[folder] = stage_codes(folder)
    now, was = codes[workspace][stage], codes[before][stage]
    if "functions" in changed:
        yield from _changed_functions(now, was)
    if "packages" in changed:
        for name in sorted(now.packages | was.packages):
            versions = [code.packages.get(name, "none") for code in (was, now)]
            if versions[0] != versions[1]:
                yield f"the package {name}: {versions[0]} -> {versions[1]}"


def _changed_functions(now: StageCode, was: StageCode) -> Iterator[str]:
    """Yield the changed functions with their diffs, but not unchanged functions that call them."""
    new, old = _sources(now), _sources(was)
    for name in sorted(new | old):
        if new.get(name) == old.get(name):
            continue
        (lines, _), (former, _) = new.get(name, ([], "")), old.get(name, ([], ""))
        done = "changed" if lines and former else "is new" if lines else "is gone"
        diff = difflib.unified_diff(former, lines, n=2)
        shown = "".join(f"    {line}" for line in list(diff)[2:])
        yield f"{name} {done}\n{shown if done == 'changed' else ''}".rstrip()


def _sources(code: StageCode) -> dict[str, tuple[list[str], str]]:
    """Return the source lines and the digest of each definition, by its name."""
    return {str(each): (each.lines, each.digest) for each in code.reached.definitions}


def _time(
    stage: str, planned: Mapping[str, Any] | None, before: Path | None
) -> tuple[float | None, float | None, str]:
    """Return the seconds, the cost, and where the seconds come from."""
    told = (planned or {}).get("stages", {}).get(stage, {})
    if told.get("hours") is not None:
        return told["hours"] * 3600, told.get("cost"), "by the plan"
    if before is not None and (seconds := usage_of(before, stage).seconds):
        return seconds, None, f"as in {Run.read(before).dag_run_id}"
    return None, None, ""


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


KEEP = "keep"  # in a DAG run's conf: the arguments `names`, `who` and `why`


def keep(workspace: Path, runs: Path, names: Sequence[str], *, who: str, why: str) -> list[str]:
    """Record which stages take the newest earlier run's result; return one line about each.

    Args:
        workspace: The run's workspace, before any stage has run.
        runs: The folder of all workspaces.
        names: The names of the stages.
        who: The user who wants it.
        why: The user's reason.

    Raises:
        UserError: A stage is never cached, or no earlier run has a result of it.
    """
    kept: dict[str, Any] = {}
    for name in names:
        said = dvc_cache.stages(workspace).get(name)
        if said is None or said.get("always_changed"):
            raise UserError(
                f"--keep {name}: the stages whose results can be kept are "
                f"{', '.join(_cached(workspace))}"
            )
        before = earlier_run(workspace, runs, name)
        if before is None or recipe_name(before) != recipe_name(workspace):
            raise UserError(f"--keep {name}: no earlier run of this recipe has a result of it")
        lock = read_yaml(before / "dvc.lock")
        kept[name] = {
            "run": Run.read(before).dag_run_id,
            "who": who,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "why": why,
            "changed": list(reasons(workspace, before, name, {}))[1:],
            "entry": lock["stages"][name],
        }
    write_json(workspace / KEPT_FILE, kept)
    return [
        f"{name} is kept from {each['run']} for {each['who']}: {each['why']}"
        for name, each in kept.items()
    ]


def _cached(workspace: Path) -> list[str]:
    found = dvc_cache.stages(workspace)
    return [name for name, said in found.items() if not said.get("always_changed")]
