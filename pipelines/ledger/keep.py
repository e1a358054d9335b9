"""Results of stages that a user keeps although their keys have changed: `run --keep train --why`.

`kept.json` in the workspace says which, from which run, who said so, when and why, and what had
changed; the lineage of a model has it, too.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from pipelines.core.errors import UserError
from pipelines.core.records import KEPT_FILE
from pipelines.core.storage import write_json
from pipelines.ledger import stage_cache
from pipelines.ledger.explain import earlier_run, reasons, recipe_name
from pipelines.ledger.workspace import Run

KEEP = "keep"  # in a DAG run's conf: the arguments `names`, `who` and `why`


def keep(workspace: Path, runs: Path, names: Sequence[str], *, who: str, why: str) -> list[str]:
    """Note which stages' results are taken from the newest earlier run; a line about each.

    Args:
        workspace: The run's, before any stage of it.
        runs: The folder of all workspaces.
        names: Of stages.
        who: Whose wish it is.
        why: Their reason.

    Raises:
        UserError: a stage is not one that is cached, or no earlier run has a result of it.
    """
    kept: dict[str, Any] = {}
    for name in names:
        said = stage_cache.stages(workspace).get(name)
        if said is None or said.get("always_changed"):
            raise UserError(
                f"--keep {name}: the stages whose results are kept are "
                f"{', '.join(_cached(workspace))}"
            )
        before = earlier_run(workspace, runs, name)
        if before is None or recipe_name(before) != recipe_name(workspace):
            raise UserError(f"--keep {name}: no earlier run of this recipe has a result of it")
        lock = yaml.safe_load((before / "dvc.lock").read_text(encoding="utf-8"))
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
        f"{name} is kept from {each['run']}, says {each['who']}: {each['why']}"
        for name, each in kept.items()
    ]


def _cached(workspace: Path) -> list[str]:
    found = stage_cache.stages(workspace)
    return [name for name, said in found.items() if not said.get("always_changed")]
