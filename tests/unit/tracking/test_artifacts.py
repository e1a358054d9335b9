"""One file of a run, from a folder and from a bucket, there or not."""

import pytest

from pipelines.tracking.run_search import read_artifact, read_run_artifact
from tests.s3_server import s3_bucket


@pytest.fixture
def run_id(mlflow_client, mlflow_run, tmp_path):
    file = tmp_path / "loss_curve.csv"
    file.write_text("step\n1 — ü\n", encoding="utf-8")
    mlflow_client.log_artifact(mlflow_run, str(file), "evaluate")
    return mlflow_run


def test_a_file_of_a_run_is_read(run_id):
    assert read_run_artifact(run_id, "evaluate/loss_curve.csv") == "step\n1 — ü\n"


@pytest.mark.parametrize("path", ["evaluate/other.csv", "other/loss_curve.csv", "other"])
def test_a_file_that_is_not_there_is_none(run_id, path):
    assert read_run_artifact(run_id, path) is None


def test_a_run_that_is_gone_has_none(run_id):
    assert read_run_artifact("0" * 32, "evaluate/loss_curve.csv") is None


def test_a_file_in_a_bucket_is_read_and_what_is_not_there_is_none():
    with s3_bucket("artifacts") as bucket:
        bucket.put_object(Key="1/a/evaluate/loss_curve.csv", Body=b"step\n1\n")
        bucket.put_object(Key="1/a/lineage.json", Body=b"{}")
        address = "s3://artifacts/1/a"
        assert read_artifact(address, "evaluate/loss_curve.csv") == "step\n1\n"
        assert read_artifact(address, "lineage.json") == "{}"
        assert read_artifact(address, "evaluate/other.csv") is None
        assert read_artifact(address, "other/loss_curve.csv") is None
