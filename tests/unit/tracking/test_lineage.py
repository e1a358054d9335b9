import hashlib

from pipelines.core.storage import write_json, write_text
from pipelines.run.records import ValidateRecord
from pipelines.tracking.lineage import lineage


def test_it_holds_all_that_the_workspace_says(tmp_path):
    write_json(tmp_path / "run.json", {"git_commit": "c0ffee", "dirty": True})
    write_json(tmp_path / "environment.json", {"lock": "abc"})
    write_json(tmp_path / "kept.json", {"train": {"run": "before", "why": "a comment"}})
    write_text(tmp_path / "params.yaml", "name: small\nseed: 3\n")
    write_text(tmp_path / "dvc.lock", "schema: '2.0'\n")
    record = ValidateRecord(expectations=20, data_docs="data_docs/index.html").write(tmp_path)
    found = lineage(tmp_path)
    assert found["run"]["dirty"] is True
    assert found["recipe"] == {"name": "small", "seed": 3}
    assert found["kept"]["train"]["why"] == "a comment"
    assert found["environment"] == {"lock": "abc"}
    assert found["sha256"]["dvc.lock"] == hashlib.sha256(b"schema: '2.0'\n").hexdigest()
    assert found["records"] == {"validate": record.model_dump(mode="json")}


def test_what_is_missing_is_null(tmp_path):
    found = lineage(tmp_path)
    assert found["run"] is None
    assert found["recipe"] is None
    assert set(found["sha256"].values()) == {None}
    assert found["records"] == {}
