"""`penstock stage`: one stage as a child process of the terminal."""

import hashlib
import subprocess
import sys
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.recipe import Recipe
from pipelines.core.recipe_files import override_values
from pipelines.core.records import STAGES
from pipelines.core.settings import PROJECT, Settings
from pipelines.ledger import stage_cache
from pipelines.ledger.opening import open_workspace, project_state
from pipelines.ledger.run_source import settle
from pipelines.stages.runner import INPUTS, forget_error, stage_environment


def run_foreground(stage: str, recipe: Recipe, settings: Settings) -> tuple[Path, int]:
    """Run a stage and record it in the stage cache; returns its workspace and its exit code.

    The workspace belongs to this code, recipe and data: another call with the same goes on there.
    """
    recipe = override_values(recipe, {"resources.workers": 1})  # one process: world size 1
    recipe, source = settle(recipe)
    identity = f"{project_state(PROJECT)}{recipe.fingerprint()}{source}"
    run_id = f"stage-{recipe.name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    workspace = open_workspace(PROJECT, settings.home, run_id, recipe, source)
    for needed in STAGES[: STAGES.index(stage)]:
        if not stage_cache.restore(workspace, needed) and needed in INPUTS[stage]:
            raise UserError(
                f"{stage} reads what {needed} writes, and {needed} has not run with this code, "
                f"recipe and data; run `penstock stage {needed}` first, with the same options"
            )
    forget_error(workspace)
    command = [sys.executable, "-m", "pipelines.stages", stage]
    code = subprocess.run(
        command, cwd=workspace, env=stage_environment(workspace), check=False
    ).returncode
    if code == 0:
        stage_cache.commit(workspace, stage)
    return workspace, code
