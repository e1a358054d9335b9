"""What starts fast imports little."""

import subprocess
import sys

import pytest

from pipelines.core.settings import PROJECT
from tests.processor_time import limit

HEAVY = ("torch", "ray", "mlflow", "great_expectations", "dvc", "transformers", "pandas")
PARSED = """
import runpy, sys, time
from airflow.sdk import DAG, Param, BaseOperator, CronTriggerTimetable
began = time.process_time()
runpy.run_path(sys.argv[1])
print(time.process_time() - began, *sys.modules)
"""


def imported_by(code: str) -> set[str]:
    return set(printed_by(f"import sys; {code}; print(*sys.modules)"))


def printed_by(code: str, *arguments: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.split()


@pytest.mark.parametrize(
    "code",
    [
        "import pipelines.cli",
        "import pipelines.recipe.recipe_files",
        "import pipelines.models.presets, pipelines.training.recipe_check",
    ],
    ids=["cli", "recipe", "checks"],
)
def test_nothing_heavy_is_imported(code):
    assert imported_by(code).isdisjoint(HEAVY)


@pytest.mark.parametrize("dag", ["llm_pipeline", "data_refresh", "llm_sweep", "collect_garbage"])
def test_parsing_a_dag_costs_at_most_a_second_over_airflows_sdk(dag):
    # Of the processor: that others use it, too, is no regression.
    seconds, *modules = printed_by(PARSED, f"dags/{dag}.py")
    assert float(seconds) < limit(1.0)
    assert set(modules).isdisjoint(HEAVY)
