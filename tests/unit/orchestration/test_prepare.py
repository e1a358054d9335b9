"""What a run is made of before its first stage."""

from types import SimpleNamespace

import pytest

from pipelines.core.storage import read_json
from pipelines.orchestration.stage_task import PrepareOperator
from pipelines.recipe.recipe_files import RESOLVED, load_recipe
from pipelines.run.workspace import Run, read_recipe
from tests.unit.orchestration.test_cluster_plan import cluster, node


@pytest.mark.parametrize(
    ("gpus", "precision", "compiled"), [(2, "bf16", True), (0, "fp32", False)], ids=["gpu", "cpu"]
)
def test_its_recipe_its_plan_and_its_params_say_what_auto_became(
    gpus, precision, compiled, home, mlflow_client, tmp_path, monkeypatch
):
    (tmp_path / "text.txt").write_text("some text\n")
    files = ("data.source.kind=files", f"data.source.path={tmp_path / 'text.txt'}")
    dag_run = SimpleNamespace(
        dag_id="llm_pipeline",
        run_id=f"with {gpus} GPUs",
        conf={RESOLVED: load_recipe("debug", files).to_dict()},
    )
    context = {
        "dag_run": dag_run,
        "params": {},
        "triggering_asset_events": {},
        "ti": SimpleNamespace(xcom_push=lambda **_: None),
    }
    with cluster([node(gpus)], tmp_path, monkeypatch) as settings:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", settings.ray_url)
        workspace = home / "runs" / PrepareOperator(task_id="prepare").execute(context)
    train = read_recipe(workspace).train
    assert (train.precision, train.compile) == (precision, compiled)
    planned = read_json(workspace / "plan.json")["asked"]
    assert (planned["precision"], planned["compile"]) == (precision, compiled)
    run = Run.read(workspace)
    assert run.recipe_fingerprint == read_recipe(workspace).fingerprint()
    params = mlflow_client.get_run(run.mlflow_run_id).data.params
    assert params["train.precision"] == precision
    assert params["train.compile"] == str(compiled)
