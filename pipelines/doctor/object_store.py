"""S3 and the DVC remote: written, read and removed for real, and by whose clock."""

import os
import time
import uuid
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from pipelines.core.recipe import Recipe
from pipelines.core.settings import load_settings
from pipelines.doctor.findings import FaultError, NotHereError, Seen, ok, problem, warning
from pipelines.doctor.mounts import existing

_PREFIX = ".penstock-doctor"
_CONTENT = b"penstock doctor"
_REFUSED_S = 15 * 60  # S3 answers RequestTimeTooSkewed beyond (AWS, S3 error responses)
_MUCH_S = 60.0
_TIMEOUT_S = 3


def datasets_remote() -> Iterator[Seen]:
    """The DVC remote of dataset versions: of a folder the rights, a bucket is S3's matter."""
    remote = load_settings().datasets_remote
    folder = Path(remote)
    if remote.startswith("s3://"):
        yield ok(f"{remote} is a bucket: see S3")
    elif not folder.exists() and os.access(existing(folder), os.W_OK):
        yield ok(f"{remote} is made with the first dataset version")
    elif not os.access(folder, os.R_OK | os.W_OK):
        yield problem(f"{remote} can't be written", "mend its owner, or PENSTOCK_DATASETS_REMOTE")
    else:
        yield ok(f"{remote} can be read and written")


def s3(recipe: Recipe) -> Iterator[Seen]:
    """Every place that settings and recipe have in S3."""
    places = {load_settings().datasets_remote, recipe.train.checkpoints or ""}
    in_s3 = sorted(place for place in places if place.startswith("s3://"))
    if not in_s3:
        raise NotHereError("neither dataset versions nor checkpoints lie in S3")
    for place in in_s3:
        yield from s3_remote(place)


def s3_remote(remote: str) -> Iterator[Seen]:
    """Put, get, multipart upload and delete of a small object of our own, and the clock."""
    bucket, _, prefix = remote.removeprefix("s3://").rstrip("/").partition("/")
    key = "/".join(part for part in (prefix, _PREFIX, uuid.uuid4().hex) if part)
    client = _client()
    began = time.perf_counter()
    date = _tried(remote, "put", lambda: _put(client, bucket, key))
    try:
        _tried(remote, "get", lambda: _get(client, bucket, key))
        _tried(remote, "multipart upload", lambda: _multipart(client, bucket, key))
    finally:
        _tried(remote, "delete", lambda: client.delete_object(Bucket=bucket, Key=key))
    seconds = time.perf_counter() - began
    yield ok(f"{remote}: put, get, multipart upload and delete in {seconds:.2f} s")
    yield judge_clock(parsedate_to_datetime(date).timestamp(), time.time())


def judge_clock(there: float, here: float) -> Seen:
    """S3 signs requests by the time, and refuses those of another."""
    skew = abs(there - here)
    saw = f"S3's clock and this one differ by {skew:.0f} s"
    mend = "let this machine's clock follow a time server: chrony"
    if skew > _REFUSED_S:
        return problem(f"{saw}; beyond {_REFUSED_S} s requests are refused", mend)
    return warning(saw, mend) if skew > _MUCH_S else ok(saw)


def _client() -> Any:
    try:
        import boto3
    except ImportError:
        raise NotHereError("boto3 is not installed") from None
    from botocore.config import Config

    config = Config(
        connect_timeout=_TIMEOUT_S, read_timeout=_TIMEOUT_S, retries={"max_attempts": 0}
    )
    return boto3.session.Session().client("s3", config=config)


def _tried(remote: str, what: str, work: Any) -> Any:
    from botocore.exceptions import BotoCoreError, ClientError

    mend = "mend AWS_ENDPOINT_URL, the keys, or what their policy allows in this bucket"
    try:
        return work()
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code == "RequestTimeTooSkewed":
            mend = "let this machine's clock follow a time server: chrony"
        raise FaultError(f"{remote}: {what}: {error}", mend) from None
    except BotoCoreError as error:
        raise FaultError(f"{remote}: {what}: {error}", mend) from None


def _put(client: Any, bucket: str, key: str) -> str:
    answer = client.put_object(Bucket=bucket, Key=key, Body=_CONTENT)
    return str(answer["ResponseMetadata"]["HTTPHeaders"]["date"])


def _get(client: Any, bucket: str, key: str) -> None:
    if client.get_object(Bucket=bucket, Key=key)["Body"].read() != _CONTENT:
        raise FaultError(f"s3://{bucket}/{key} came back changed", "look at proxies and gateways")


def _multipart(client: Any, bucket: str, key: str) -> None:
    """One part, as the last may be of any size."""
    place = {"Bucket": bucket, "Key": key}
    upload = client.create_multipart_upload(**place)["UploadId"]
    try:
        part = client.upload_part(**place, UploadId=upload, PartNumber=1, Body=_CONTENT)
        parts = {"Parts": [{"ETag": part["ETag"], "PartNumber": 1}]}
        client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload=parts)
    except BaseException:
        client.abort_multipart_upload(**place, UploadId=upload)
        raise
