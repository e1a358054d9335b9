"""Each stage's code as one fingerprint: the functions that it reaches, the packages it imports.

`dvc.yaml` says where a stage's code begins (`meta.code`) and takes the fingerprint as a parameter.
"""

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pipelines.core.errors import UserError
from pipelines.core.storage import write_json
from pipelines.stage_cache.reach import Reached, reach
from pipelines.stage_cache.syntax import Sources

CODE_FILE = "code.json"  # in a workspace: the fingerprints, by stage
NEUTRAL = Path(__file__).with_name("neutral.yaml")
LOCK = "requirements.lock"
# Packages whose modules have another name.
_DISTRIBUTIONS = {"stdnum": "python-stdnum", "yaml": "pyyaml"}


@dataclass(frozen=True)
class StageCode:
    """What a stage runs.

    Attributes:
        reached: The definitions of the project's own code.
        packages: The version of each package that the stage imports, or that such a one requires.
    """

    reached: Reached
    packages: dict[str, str]

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """What goes into the stage's key: two hashes, so that either shows its change."""
        lines = [f"{name}=={version}" for name, version in sorted(self.packages.items())]
        packages = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return {"functions": self.reached.fingerprint(), "packages": packages}


def write_code(workspace: Path) -> None:
    """Write the fingerprints of every stage; nothing where `dvc.yaml` asks for none.

    Raises:
        UserError: `meta.code` in `dvc.yaml` names a function that doesn't exist.
    """
    codes = stage_codes(workspace)
    if codes:
        write_json(
            workspace / CODE_FILE, {stage: code.fingerprints for stage, code in codes.items()}
        )


def stage_codes(folder: Path) -> dict[str, StageCode]:
    """Return the code of each stage in a checkout of the project.

    Raises:
        UserError: `meta.code` in `dvc.yaml` names a function that doesn't exist.
    """
    sources, lock = Sources(folder), Lock((folder / LOCK).read_text(encoding="utf-8"))
    neutral = neutral_modules()
    found = {}
    for stage, entries in _entries(folder):
        try:
            found[stage] = stage_code(sources, entries, neutral, lock)
        except LookupError as error:
            raise UserError(f"dvc.yaml: stages.{stage}.meta.code: {error.args[0]}") from error
    return found


def stage_code(
    sources: Sources, entries: Iterable[str], neutral: Iterable[str], lock: "Lock"
) -> StageCode:
    """Return the code that begins at the entries, each `module:function`."""
    reached = reach(sources, entries, neutral)
    return StageCode(reached, lock.closure(reached.packages))


def neutral_modules() -> dict[str, str]:
    """Return the modules that can't change a stage's outputs, each with the reason."""
    found: dict[str, str] = yaml.safe_load(NEUTRAL.read_text(encoding="utf-8"))
    return found


def _entries(folder: Path) -> Iterator[tuple[str, list[str]]]:
    stages: dict[str, Any] = yaml.safe_load((folder / "dvc.yaml").read_text("utf-8"))["stages"]
    for name, stage in stages.items():
        if entries := stage.get("meta", {}).get("code"):
            yield name, entries


class Lock:
    """A lock file as `uv pip compile` writes it: each version, and which packages require it."""

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
        """Return the versions of the packages with these modules, and of all that they require."""
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
