"""What starts fast imports little."""

import subprocess
import sys
import time

import pytest

from pipelines.core.settings import PROJECT

HEAVY = ("torch", "ray", "mlflow", "great_expectations", "dvc", "transformers", "pandas")


def imported_by(code: str) -> set[str]:
    script = f"import sys; {code}; print('\\n'.join(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import runpy; runpy.run_path('dags/llm_pipeline.py')",
        "import runpy; runpy.run_path('dags/data_refresh.py')",
        "import runpy; runpy.run_path('dags/llm_sweep.py')",
        "import pipelines.cli",
        "import pipelines.core.recipe_files",
        "import pipelines.models.presets, pipelines.training.supported",
    ],
    ids=["llm_pipeline", "data_refresh", "llm_sweep", "cli", "recipe", "checks"],
)
def test_nothing_heavy_is_imported(code):
    assert imported_by(code).isdisjoint(HEAVY)


def seconds(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True)
    return time.perf_counter() - started


@pytest.mark.parametrize("dag", ["llm_pipeline", "data_refresh", "llm_sweep"])
def test_parsing_a_dag_costs_at_most_a_second_over_airflows_sdk(dag):
    def over_the_sdk() -> float:
        parsed = seconds(f"import runpy; runpy.run_path('dags/{dag}.py')")
        return parsed - seconds(
            "from airflow.sdk import DAG, Param, BaseOperator, CronTriggerTimetable"
        )

    # The best of three pairs: a machine that is busy for a moment is no regression.
    assert any(over_the_sdk() < 1.0 for _ in range(3))
