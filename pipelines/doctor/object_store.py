"""S3 and the DVC remote: written, read and removed for real, and by whose clock."""

import time
import uuid
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from pipelines.core.recipe import Recipe
from pipelines.core.settings import load_settings
from pipelines.doctor.findings import FaultError, NotHereError, Seen, ok, problem, warning
from pipelines.doctor.mounts import existing

_PREFIX = ".penstock-doctor"
_CONTENT = b"penstock doctor"
_REFUSED_S = 15 * 60  # S3 answers RequestTimeTooSkewed beyond (AWS, S3 error responses)
_MUCH_S = 60.0
_TIMEOUT_S = 3
_REMOTE = "PENSTOCK_DATASETS_REMOTE"
_CLOCK = "let this machine's clock follow a time server: chrony"
_ACCESS = "mend AWS_ENDPOINT_URL, the keys, or what their policy allows in this bucket"
T = TypeVar("T")


def datasets_remote() -> Iterator[Seen]:
    """The DVC remote of dataset versions: a folder is written to, a bucket is S3's matter."""
    remote = load_settings().datasets_remote
    if remote.startswith("s3://"):
        yield ok(f"{remote} is a bucket: see S3")
        return
    if "://" in remote:
        yield problem(f"{remote} is neither a folder nor s3://", f"mend {_REMOTE}")
        return
    folder = existing(Path(remote))
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(_CONTENT)
            file.flush()
    except OSError as error:
        mend = f"mend its owner, rights or free space, or {_REMOTE}"
        yield problem(f"{folder} can't be written: {error.strerror}", mend)
        return
    made = "" if folder == Path(remote).resolve() else "; the remote is made with the first version"
    yield ok(f"{folder} can be written{made}")


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
    began = time.perf_counter()
    client = _tried(remote, "client", _client)
    date = _tried(remote, "put", lambda: _put(client, bucket, key))
    faults = []
    for what, work in (
        ("get", lambda: _get(client, bucket, key)),
        ("multipart upload", lambda: _multipart(client, bucket, key)),
        ("delete", lambda: client.delete_object(Bucket=bucket, Key=key)),
    ):
        try:
            _tried(remote, what, work)
        except FaultError as error:
            faults.append(problem(str(error), error.mend))
    seconds = time.perf_counter() - began
    yield from faults or [ok(f"{remote}: put, get, multipart upload, delete in {seconds:.2f} s")]
    yield judge_clock(parsedate_to_datetime(date).timestamp(), time.time())


def judge_clock(there: float, here: float) -> Seen:
    """S3 signs requests by the time, and refuses those of another."""
    skew = abs(there - here)
    saw = f"S3's clock and this one differ by {skew:.0f} s"
    if skew > _REFUSED_S:
        return problem(f"{saw}; beyond {_REFUSED_S} s requests are refused", _CLOCK)
    return warning(saw, _CLOCK) if skew > _MUCH_S else ok(saw)


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


def _tried(remote: str, what: str, work: Callable[[], T]) -> T:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return work()
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        mend = _CLOCK if code == "RequestTimeTooSkewed" else _ACCESS
        raise FaultError(f"{remote}: {what}: {error}", mend) from None
    except (BotoCoreError, ValueError) as error:  # botocore's word for a bad endpoint is ValueError
        raise FaultError(f"{remote}: {what}: {error}", _ACCESS) from None


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
