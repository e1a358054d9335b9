import subprocess
import sys
from pathlib import Path

from pipelines.core.settings import PROJECT

# In a process of its own: a worker sets up logging and its environment.
WORKERS = """
import sys
from pipelines.core.errors import UserError
from pipelines.recipe.recipe_files import load_recipe
from pipelines.stages.train import train_stage
from ray_jobs.train_on_ray import _work

def config(folder, *sets):
    recipe = load_recipe("debug", sets).to_dict()
    return {"recipe": recipe, "workspace": folder, "environment": {}}

def fails(*_, **__):
    print("tried")
    raise UserError("this worker has too little memory")

print(_work(config(sys.argv[1], "model.preset=none-such")))
train_stage.run, alone = fails, config(sys.argv[2])
try:
    _work(alone)
except UserError as error:
    print("raised", error)
print("returned", _work(alone))
"""


def test_a_users_error_is_a_line_and_a_workers_own_is_told_by_the_next_try(
    tmp_path: Path,
) -> None:
    """One that all meet is each one's result; another ends its process, and so the others."""
    folders = [tmp_path / "all", tmp_path / "one"]
    for folder in folders:
        folder.mkdir()
    result = subprocess.run(
        [sys.executable, "-c", WORKERS, *folders],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    of_all, *of_one = result.stdout.splitlines()
    assert of_all.startswith("model.preset = 'none-such': no such preset")
    assert "Traceback (most recent call last)" in result.stderr
    assert "UserError: model.preset = 'none-such': no such preset" in result.stderr
    line = "this worker has too little memory"
    assert of_one == ["tried", f"raised {line}", f"returned {line}"]
