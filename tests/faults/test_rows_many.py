"""Row 19: two runs of the pipeline and a refresh of data at once."""

import json

import pytest

from pipelines.recipe.recipe_files import RESOLVED, load_recipe
from pipelines.run.workspace import Run, read_recipe
from tests.faults.pipeline_run import END_LIMIT_S

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]

REFRESH = "data_refresh"


def test_row_19_two_pipelines_and_a_refresh(scenario, reference, tmp_path):
    for number in range(30):
        lines = (f"document {number} has a line {line} of its own" for line in range(40))
        (tmp_path / f"{number:02}.txt").write_text("\n".join(lines))
    source = ["data.source.kind=files", f"data.source.path={tmp_path}", "data.name=many"]
    recipe = load_recipe("debug", [*source, "register.model_name=penstock-many"])
    first = scenario.start()
    airflow = first.airflow
    airflow.wait_for_dag(REFRESH)
    airflow.unpause(REFRESH)
    airflow.trigger(REFRESH, "many", {RESOLVED: recipe.to_dict()})
    second = scenario.start()

    over = ("success", "failed")
    first.wait(lambda: airflow.run_state(REFRESH, "many") in over, "the refresh", END_LIMIT_S)
    assert airflow.run_state(REFRESH, "many") == "success"
    scenario.ends_well(first, like=reference)
    scenario.ends_well(second, like=reference)
    listed = scenario.platform.penstock("data", "list", "many", "--json").stdout
    assert [version["label"] for version in json.loads(listed)] == ["many@1"]
    scenario.holds("one dataset version")

    (third,) = [
        Run.read(path).dag_run_id
        for path in scenario.platform.settings.runs.iterdir()
        if (path / "run.json").is_file() and read_recipe(path).data.source.path == "many@1"
    ]
    first.wait(
        lambda: airflow.run_state("llm_pipeline", third) in over, "its training", END_LIMIT_S
    )
    assert airflow.run_state("llm_pipeline", third) == "success"
    scenario.holds("the new version was trained on")
