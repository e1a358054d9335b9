"""Tries whether a folder or a prefix in S3 can be written, before hours of work rest on it."""

import tempfile
from pathlib import Path

from pipelines.core.errors import UnreachableError, UserError, one_line
from pipelines.core.storage import may_pass

PROBE = "penstock-probe"  # in S3: it stays, as a key that may write need not be one that may delete
_TIMEOUT_S = 5


def check_writable(place: str, name: str, fix: str, endpoint: str | None = None) -> None:
    """Write a small file to a place; a folder that is missing is made.

    Args:
        place: A folder, or s3://bucket/prefix.
        name: What the place is called in the error.
        fix: What a user can do about it.
        endpoint: The S3 server; None: the one of AWS's own variables.

    Raises:
        UserError: The place can't be written; UnreachableError, where a later try may succeed.
    """
    try:
        if place.startswith("s3://"):
            _write_object(place, endpoint)
        else:
            _write_file(Path(place))
    except (OSError, UserError) as error:
        passes = may_pass(error) or isinstance(error, UnreachableError)
        kind = UnreachableError if passes else UserError
        raise kind(f"{name}: {place} can't be written: {one_line(error)}; {fix}") from error


def _write_file(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:  # it is gone even if this process is killed
        file.write(b"\0")


def _write_object(place: str, endpoint: str | None) -> None:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    bucket, _, prefix = place.removeprefix("s3://").rstrip("/").partition("/")
    key = f"{prefix}/{PROBE}".lstrip("/")
    config = Config(
        connect_timeout=_TIMEOUT_S, read_timeout=_TIMEOUT_S, retries={"max_attempts": 1}
    )
    try:
        client = boto3.session.Session().client("s3", endpoint_url=endpoint, config=config)
        client.put_object(Bucket=bucket, Key=key, Body=b"")
    except ClientError as error:
        is_servers = error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500
        raise (UnreachableError if is_servers else UserError)(one_line(error)) from error
    except (NoCredentialsError, ValueError) as error:  # ValueError: a bad endpoint
        raise UserError(one_line(error)) from error
    except BotoCoreError as error:
        raise UnreachableError(one_line(error)) from error
