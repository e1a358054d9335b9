"""A place is written to before a run rests on it: a folder, or a bucket of a real S3 API."""

import re

import pytest

from pipelines.core.errors import UnreachableError, UserError
from pipelines.core.writable_place import PROBE, check_writable
from tests.s3_server import s3_bucket


@pytest.fixture(scope="module")
def bucket():
    with s3_bucket("places") as made:
        yield made


def test_a_folder_is_made_and_left_empty(tmp_path):
    check_writable(str(tmp_path / "a/b"), "PLACE", "fix it")
    assert list((tmp_path / "a/b").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    told = f"PLACE: {tmp_path}/file/below can't be written: "
    with pytest.raises(UserError, match=f"^{re.escape(told)}.*; fix it$") as refused:
        check_writable(str(tmp_path / "file/below"), "PLACE", "fix it")
    assert not isinstance(refused.value, UnreachableError)


@pytest.mark.parametrize("place", ["s3://places", "s3://places/", "s3://places/a/b"])
def test_a_bucket_gets_one_small_object(bucket, place):
    for _ in range(2):
        check_writable(place, "PLACE", "fix it")
    prefix = place.removeprefix("s3://places").strip("/")
    assert f"{prefix}/{PROBE}".lstrip("/") in {each.key for each in bucket.objects.all()}


def test_a_bucket_that_is_not_there_is_one_line(bucket):
    with pytest.raises(UserError, match=r"s3://none/a can't be written: .*NoSuchBucket.*; fix it"):
        check_writable("s3://none/a", "PLACE", "fix it")


def test_a_store_that_is_away_is_an_outage(bucket):
    with pytest.raises(UnreachableError, match="can't be written"):
        check_writable("s3://places/a", "PLACE", "fix it", endpoint="http://127.0.0.1:9")
    with pytest.raises(UserError, match="Invalid endpoint"):
        check_writable("s3://places/a", "PLACE", "fix it", endpoint="no url")
