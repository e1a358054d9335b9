"""S3 and the DVC remote: written, read and removed for real, and by whose clock."""

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from pipelines.core.errors import UserError
from pipelines.core.recipe import Recipe
from pipelines.core.settings import load_settings
from pipelines.doctor.findings import (
    FaultError,
    Finding,
    NotHereError,
    Seen,
    State,
    ok,
    problem,
    warning,
)
from pipelines.doctor.mounts import existing
from pipelines.doctor.object_store_needs import NEEDS, REMOVAL, Need, Scratch

_PREFIX = ".penstock-doctor"
_CONTENT = b"penstock doctor"
_REFUSED_S = 15 * 60  # S3 answers RequestTimeTooSkewed beyond (AWS, S3 error responses)
_MUCH_S = 60.0
_TIMEOUT_S = 5
_REMOTE = "PENSTOCK_DATASETS_REMOTE"
_CLOCK = "let this machine's clock follow a time server: chrony"
_ACCESS = "mend AWS_ENDPOINT_URL, the keys, or what their policy allows in this bucket"
_CLOCK_NEED = Need("clock", "requests are signed by the time", lambda _: ok(""))
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
    """All that we need of a bucket, in one line where it is well, and the clock."""
    began = time.perf_counter()
    tried = try_store(remote)
    seconds = time.perf_counter() - began
    bad = [seen for _, seen in tried if seen.state in (State.WARNING, State.PROBLEM)]
    done = [need.name for need, seen in tried if seen.state is State.OK]
    yield from bad or [ok(f"{remote}: {', '.join(done)} in {seconds:.2f} s")]


def examine_store(remote: str) -> list[Finding]:
    """The same, each need by itself: what `penstock doctor --s3` shows."""
    if not remote.startswith("s3://") or remote == "s3://":
        raise UserError(f"--s3 {remote}: give a bucket, such as s3://bucket/prefix")
    try:
        tried = try_store(remote)
    except NotHereError as error:
        raise UserError(f"--s3 {remote}: {error}") from None
    except FaultError as error:
        why = "every checkpoint, model and dataset version lies there"
        return [Finding("client", State.PROBLEM, str(error), why, error.mend)]
    return [Finding(n.name, seen.state, seen.saw, n.why, seen.mend) for n, seen in tried]


def try_store(remote: str) -> list[tuple[Need, Seen]]:
    """Try each need below a prefix, which is empty again afterwards.

    Where nothing can be written or read, nothing more is tried.

    Raises:
        FaultError: endpoint or profile are of no use.
    """
    bucket, _, prefix = remote.removeprefix("s3://").rstrip("/").partition("/")
    client = _tried(remote, "client", _client)
    dates: list[str] = []
    client.meta.events.register("after-call.s3", partial(_note_date, dates))
    own = "/".join(part for part in (prefix, _PREFIX, uuid.uuid4().hex) if part)
    store = Scratch(client, bucket, own)
    tried: list[tuple[Need, Seen]] = []
    try:
        for need in NEEDS:
            tried.append((need, _seen(remote, need, store)))
            if tried[0][1].state is State.PROBLEM:
                return tried
    finally:
        tried.append((REMOVAL, _seen(remote, REMOVAL, store)))
    return [*tried, (_CLOCK_NEED, judge_clock(dates, time.time()))]


def judge_clock(dates: list[str], here: float) -> Seen:
    """S3 signs requests by the time, and refuses those of another; `dates` is what it answered."""
    if not dates:
        return Seen(State.NOT_HERE, "the store does not tell its time in its answers")
    there = parsedate_to_datetime(dates[-1]).timestamp()
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


def _seen(remote: str, need: Need, store: Scratch) -> Seen:
    try:
        seen = _tried(remote, need.name, lambda: need.work(store))
    except FaultError as error:
        return problem(str(error), error.mend)
    return seen if seen.state is State.OK else replace(seen, saw=f"{remote}: {seen.saw}")


def _note_date(dates: list[str], *, http_response: Any, **_: object) -> None:
    dates.extend(filter(None, [http_response.headers.get("date")]))
