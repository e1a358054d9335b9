"""Dataset versions whose files lie on S3, through a custom endpoint: a real server, moto's."""

import logging
from pathlib import Path

import pytest

from pipelines.core.errors import UserError
from pipelines.datasets import versions
from pipelines.datasets.dataset_publishing import make
from tests.s3_server import s3_bucket
from tests.unit.datasets.dataset_workspace import make_workspace

SECRET = "a-very-secret-key"


@pytest.fixture(scope="module")
def bucket():
    with s3_bucket("datasets", SECRET) as made:
        yield made


@pytest.fixture
def home(bucket, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PENSTOCK_DATASETS_URL", raising=False)
    monkeypatch.setenv("PENSTOCK_DATASETS_REMOTE", f"s3://datasets/{tmp_path.name}")
    return tmp_path / "home"


def objects(bucket, prefix: str) -> dict[str, int]:
    return {found.key: found.size for found in bucket.objects.filter(Prefix=prefix)}


def test_a_version_goes_to_s3_and_comes_back(bucket, home, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    workspace = make_workspace(tmp_path / "run", "text on s3\n" * 200)
    made = make(workspace)
    assert list(versions.verify(made)) == []
    record = versions.fetch(made, tmp_path / "fetched")
    for path in (workspace / "outputs/preprocess").rglob("*"):
        if path.is_file() and path.name != "record.json":
            name = path.relative_to(workspace / "outputs/preprocess")
            assert (tmp_path / "fetched" / name).read_bytes() == path.read_bytes()
    shard = record.dataset.train.shards[0]
    assert record.dataset.remote == f"s3://datasets/{tmp_path.name}"
    where = f"{tmp_path.name}/files/md5/{shard.md5[:2]}/{shard.md5[2:]}"
    assert objects(bucket, tmp_path.name)[where] == shard.bytes

    # No secret is in what was written or said.
    assert SECRET not in caplog.text
    for path in home.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
    assert all(SECRET.encode() not in key.get()["Body"].read() for key in bucket.objects.all())


def test_the_same_content_is_pushed_once(bucket, home, tmp_path):
    first = make(make_workspace(tmp_path / "run", "text on s3\n" * 200))
    before = {found.key: found.last_modified for found in bucket.objects.all()}
    assert make(make_workspace(tmp_path / "again", "text on s3\n" * 200)) == first
    assert {found.key: found.last_modified for found in bucket.objects.all()} == before


def test_a_swapped_object_is_found_and_named(bucket, home, tmp_path):
    made = make(make_workspace(tmp_path / "run", "text on s3\n" * 200))
    oid = made.dataset.train.shards[0].index_md5
    key = f"{tmp_path.name}/files/md5/{oid[:2]}/{oid[2:]}"
    body = bytearray(bucket.Object(key).get()["Body"].read())
    body[-1] ^= 1
    bucket.put_object(Key=key, Body=bytes(body))
    assert {file.path for file, _ in versions.verify(made)} >= {"tokens/train-00000.idx"}
    with pytest.raises(UserError, match=f"{oid}.*is damaged"):
        versions.fetch(made, tmp_path / "out")
    bucket.Object(key).delete()
    assert ("tokens/train-00000.idx", "is missing") in [
        (file.path, why) for file, why in versions.verify(made)
    ]


def test_a_bucket_that_is_not_there_makes_no_version(home, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_DATASETS_REMOTE", "s3://no-such-bucket/x")
    with pytest.raises(UserError, match=r"s3://no-such-bucket/x: .*(does not exist|NoSuchBucket)"):
        make(make_workspace(tmp_path / "run", "text\n" * 20))
    assert versions.list_versions() == []


def test_no_keys_are_one_line(home, tmp_path, monkeypatch):
    made = make(make_workspace(tmp_path / "run", "text\n" * 20))
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    for variable in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(variable, str(tmp_path / "nothing"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    drop_clients()
    try:
        with pytest.raises(UserError, match="the keys that AWS's own variables"):
            list(versions.verify(made))
    finally:
        drop_clients()


def drop_clients() -> None:
    """fsspec keeps a client, with the keys it found, for the life of a process."""
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()
