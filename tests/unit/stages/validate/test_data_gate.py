"""What the data gate leaves in MLflow; the gate itself is tested in tests/unit/validation."""

import json

from pipelines.core.storage import write_json, write_text
from pipelines.stages.validate import STAGE

PAGE = "http://mlflow.test/#/experiments/1/runs/abc"


def test_data_docs_and_bad_documents_are_the_runs_and_its_tag_links_to_them(
    tmp_path, mlflow_client, mlflow_run
):
    facts = {
        "dag_run_id": "manual__1",
        "git_commit": "c0ffee",
        "dirty": False,
        "recipe_fingerprint": "abc",
        "mlflow_run_id": mlflow_run,
        "mlflow_address": PAGE,
    }
    write_json(tmp_path / "run.json", facts)
    output = tmp_path / "outputs/validate"
    write_text(output / "data_docs/index.html", "<h1>Data Docs</h1>")
    write_text(output / "quarantine.jsonl", json.dumps({"doc_id": "1"}))
    STAGE.publish_outputs(tmp_path)
    files = [file.path for file in mlflow_client.list_artifacts(mlflow_run, "data_docs")]
    assert files == ["data_docs/index.html"]
    files = [file.path for file in mlflow_client.list_artifacts(mlflow_run, "validate")]
    assert files == ["validate/quarantine.jsonl"]
    tags = mlflow_client.get_run(mlflow_run).data.tags
    assert tags["penstock.data_docs"] == f"{PAGE}/artifacts/data_docs/index.html"


def test_a_workspace_without_a_run_publishes_nothing(tmp_path):
    STAGE.publish_outputs(tmp_path)
    assert list(tmp_path.iterdir()) == []
