import subprocess
import sys
from pathlib import Path

from pipelines.core.settings import PROJECT

# In a process of its own: a worker sets up logging and its environment.
WORKER = """
import sys
from pipelines.core.recipe_files import load_recipe
from ray_jobs.train import _work

recipe = load_recipe("debug", ["model.preset=none-such"]).to_dict()
print(_work({"recipe": recipe, "workspace": sys.argv[1], "environment": {}}))
"""


def test_a_persons_error_is_a_line_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WORKER, str(tmp_path)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    line = "model.preset = 'none-such': no such preset"
    assert result.stdout.startswith(line)
    assert "Traceback (most recent call last)" in result.stderr
    assert f"UserError: {line}" in result.stderr


ALONE = """
import sys
from pipelines.core.errors import UserError
from pipelines.core.recipe_files import load_recipe
from pipelines.stages import train
from ray_jobs.train import _work

def fails(*_, **__):
    print("tried")
    raise UserError("this worker has too little memory")

train.run = fails
config = {"recipe": load_recipe("debug").to_dict(), "workspace": sys.argv[1], "environment": {}}
try:
    _work(config)
except UserError as error:
    print("raised", error)
print("returned", _work(config))
"""


def test_one_workers_own_error_ends_the_others_and_is_told_by_the_next_try(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    line = "this worker has too little memory"
    assert result.stdout.splitlines() == ["tried", f"raised {line}", f"returned {line}"]
