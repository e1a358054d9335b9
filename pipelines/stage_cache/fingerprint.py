"""The fingerprint of each stage's code: the functions it reaches and the packages it imports.

`dvc.yaml` names a stage's entry functions (`meta.code`) and has the fingerprint as a parameter.
"""

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipelines.core.checked_yaml import read_yaml
from pipelines.core.errors import UserError
from pipelines.core.product import CODE, LOCK, digest_of
from pipelines.core.settings import load_settings
from pipelines.core.storage import read_json, write_json
from pipelines.stage_cache.reach import Reached, reach
from pipelines.stage_cache.syntax import Sources

CODE_FILE = "code.json"  # in a workspace: the fingerprints of each stage
_KEPT = "code-fingerprints.json"
NEUTRAL = Path(__file__).with_name("neutral.yaml")
# Import names that differ from the package's name.
_DISTRIBUTIONS = {"stdnum": "python-stdnum", "yaml": "pyyaml"}


@dataclass(frozen=True)
class StageCode:
    """The code that a stage runs.

    Attributes:
        reached: The definitions that the stage reaches in the project's own code.
        packages: The version of each package that the stage imports, and of their requirements.
    """

    reached: Reached
    packages: dict[str, str]

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """The two hashes in the stage's key: separate, to show which of the two changed."""
        lines = [f"{name}=={version}" for name, version in sorted(self.packages.items())]
        packages = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return {"functions": self.reached.fingerprint(), "packages": packages}


def write_code(workspace: Path) -> None:
    """Write the fingerprints of every stage to `code.json`, unless `dvc.yaml` asks for none.

    Raises:
        UserError: `meta.code` in `dvc.yaml` names a function that doesn't exist.
    """
    if found := fingerprints(workspace):
        write_json(workspace / CODE_FILE, found)


def fingerprints(folder: Path, files: Path | None = None) -> dict[str, dict[str, str]]:
    """Return the fingerprints of each stage's code; the arguments are those of `stage_codes`.

    They take a second to compute, so `PENSTOCK_HOME` keeps the last ones, which are those of most
    runs.

    Raises:
        UserError: `meta.code` in `dvc.yaml` names a function that doesn't exist.
    """
    kept = load_settings().home / _KEPT
    key = _content(folder, files or folder)
    with suppress(OSError, ValueError, KeyError):  # none yet, or not whole
        last = read_json(kept)
        if last["content"] == key:
            found: dict[str, dict[str, str]] = last["fingerprints"]
            return found
    found = {stage: code.fingerprints for stage, code in stage_codes(folder, files).items()}
    with suppress(OSError):  # a job with a workspace of its own may have no home to write to
        write_json(kept, {"content": key, "fingerprints": found})
    return found


def _content(folder: Path, files: Path) -> str:
    """Return a digest of all that decides the fingerprints: the code, and what computes them."""
    parts = [sys.version, digest_of(*(folder / name for name in CODE)), digest_of(NEUTRAL.parent)]
    texts = files / "dvc.yaml", files / LOCK, NEUTRAL
    parts += [hashlib.sha256(each.read_bytes()).hexdigest() for each in texts]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def stage_codes(folder: Path, files: Path | None = None) -> dict[str, StageCode]:
    """Return the code of each stage.

    Args:
        folder: The folder of the packages `pipelines` and `ray_jobs`: a checkout or a workspace.
        files: The folder of `dvc.yaml` and the lock; by default the same one.

    Raises:
        UserError: `meta.code` in `dvc.yaml` names a function that doesn't exist.
    """
    files = files or folder
    sources, lock = Sources(folder), Lock((files / LOCK).read_text(encoding="utf-8"))
    neutral = neutral_modules()
    found = {}
    for stage, entries in _entries(files):
        try:
            found[stage] = stage_code(sources, entries, neutral, lock)
        except LookupError as error:
            raise UserError(f"dvc.yaml: stages.{stage}.meta.code: {error.args[0]}") from error
    return found


def stage_code(
    sources: Sources, entries: Iterable[str], neutral: Iterable[str], lock: "Lock"
) -> StageCode:
    """Return the code reached from the entry functions, each written `module:function`."""
    reached = reach(sources, entries, neutral)
    return StageCode(reached, lock.closure(reached.packages))


def neutral_modules() -> dict[str, str]:
    """Return the modules that cannot change a stage's outputs, each with the reason."""
    found: dict[str, str] = read_yaml(NEUTRAL)
    return found


def _entries(folder: Path) -> Iterator[tuple[str, list[str]]]:
    stages: dict[str, Any] = read_yaml(folder / "dvc.yaml")["stages"]
    for name, stage in stages.items():
        if entries := stage.get("meta", {}).get("code"):
            yield name, entries


class Lock:
    """A lock file that `uv pip compile` wrote: package versions, and who requires each package."""

    def __init__(self, text: str) -> None:
        self.versions: dict[str, str] = {}
        self._requires: dict[str, set[str]] = {}
        name = ""
        for line in text.splitlines():
            if pinned := re.match(r"([\w.-]+)(?:\[[^]]*])?==(\S+)", line):
                name, self.versions[pinned[1]] = pinned[1], pinned[2]
            elif via := re.match(r"\s+#\s+(?:via\s+)?([\w.-]+)$", line):
                self._requires.setdefault(via[1], set()).add(name)

    def closure(self, modules: frozenset[str]) -> dict[str, str]:
        """Return the versions of these modules' packages and of all packages that they require."""
        todo = [self._package(module) for module in modules - sys.stdlib_module_names]
        found: dict[str, str] = {}
        while todo:
            name = todo.pop()
            if name in self.versions and name not in found:
                found[name] = self.versions[name]
                todo += self._requires.get(name, ())
        return found

    @staticmethod
    def _package(module: str) -> str:
        return _DISTRIBUTIONS.get(module, module.lower().replace("_", "-"))
