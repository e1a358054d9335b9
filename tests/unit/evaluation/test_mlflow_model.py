"""A version through MLflow's own door: its loader, and the server of `mlflow models serve`."""

import pytest
from starlette.testclient import TestClient

from pipelines.core.errors import UserError
from pipelines.evaluation.generate import generate
from pipelines.registry import registry
from pipelines.registry.promotion import promote
from pipelines.registry.registration import register
from pipelines.tracking.tracked_run import MODEL_HASH_TAG
from tests.unit.export.models import PROMPTS, small, write_registered


@pytest.fixture
def champion(name, mlflow_run, mlflow_uri, tmp_path):
    import mlflow

    folder = write_registered(small(), tmp_path / "model")
    version = register([folder], name, mlflow_run, {MODEL_HASH_TAG: "aa"}, "")
    mlflow.set_tracking_uri(mlflow_uri)
    yield promote(version, None, "ada", "")
    mlflow.set_tracking_uri(None)


def test_mlflows_server_continues_prompts(champion):
    from mlflow.pyfunc import load_model, scoring_server

    model = load_model(f"models:/{champion.name}@champion")
    client = TestClient(scoring_server.init(model))
    rows = {"columns": ["prompt"], "data": [[prompt] for prompt in PROMPTS]}
    asked = {"dataframe_split": rows, "params": {"max_tokens": 5}}
    answer = client.post("/invocations", json=asked)
    folder = registry.verified_folder(champion)  # MLflow has written a file of its own into it
    assert answer.json() == {"predictions": generate(folder, PROMPTS, 5)}
    drawn = {"params": {"max_tokens": 5, "temperature": 1.0, "seed": 7}}
    expected = generate(folder, PROMPTS, 5, temperature=1.0, seed=7)
    assert client.post("/invocations", json=asked | drawn).json() == {"predictions": expected}
    wrong = client.post("/invocations", json={"inputs": {"text": ["a"]}})
    assert wrong.status_code == 400
    assert "prompt" in wrong.text


def test_a_version_that_somebody_was_at_is_not_loaded(champion):
    from mlflow.pyfunc import load_model

    (registry.verified_folder(champion) / "README.md").write_text("# another")
    with pytest.raises(UserError, match=r"altered README\.md"):
        load_model(f"models:/{champion.name}@champion")
