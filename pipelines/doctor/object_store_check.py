"""What Penstock asks of an object store, each tried for real under a prefix of its own.

The list is made from what the code does: boto3 reads shards by range
(`loading/sources/s3_objects.py`), s3fs writes and prunes checkpoints, DVC pushes dataset versions,
MLflow uploads models in parts. Besides: whose clock S3 and the DVC remote go by.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple, TypeVar

from pipelines.core.errors import UserError
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
from pipelines.doctor.host import existing
from pipelines.recipe.recipe import Recipe

_OBJECT = bytes(range(256)) * 4
_PART = 5 << 20  # bytes; no part but the last may be smaller (AWS, multipart upload limits)
_MIB = 1 << 20
_LISTED = 5
_STORE = "change the store's settings or version; Penstock can't work without it"


@dataclass
class Scratch:
    """A prefix in a bucket that is empty before and after."""

    client: Any
    bucket: str
    prefix: str
    written: set[str] = field(default_factory=set)  # keys

    def place(self, name: str) -> dict[str, str]:
        """Bucket and key of an object."""
        return {"Bucket": self.bucket, "Key": f"{self.prefix}/{name}"}

    def put(self, name: str, content: bytes = _OBJECT) -> tuple[dict[str, str], str]:
        """Write an object; where it lies, and its ETag."""
        place = self.place(name)
        tag = str(self.client.put_object(**place, Body=content)["ETag"])
        self.written.add(place["Key"])
        return place, tag

    def names(self, folder: str) -> list[str]:
        """Return all keys below a folder, two at a time, so that pages have to be turned."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=f"{self.prefix}/{folder}/", PaginationConfig={"PageSize": 2}
        )
        return [found["Key"] for page in pages for found in page.get("Contents", ())]

    def remove(self) -> Seen:
        """Remove what is left, one by one, as a store may know no other way."""
        for key in sorted(self.written):
            self.client.delete_object(Bucket=self.bucket, Key=key)
        return ok("nothing of ours is left")


class Need(NamedTuple):
    """One thing that a store must be able to do.

    Attributes:
        name: What it is.
        why: What in Penstock rests on it.
        work: Tries it; what it saw. A refusal of the store is raised as it comes.
    """

    name: str
    why: str
    work: Callable[[Scratch], Seen]


def _write_and_read(store: Scratch) -> Seen:
    place, tag = store.put("object")
    _same(store.client.get_object(**place)["Body"].read(), _OBJECT, "an object")
    found = store.client.head_object(**place)
    if (found["ContentLength"], found["ETag"]) != (len(_OBJECT), tag):
        return problem("HEAD tells another size or ETag than PUT", _STORE)
    _, other = store.put("object", _OBJECT + b".")
    if other == tag:
        return problem("the ETag stays the same when the content changes", _STORE)
    again = store.client.get_object(**place)["Body"].read()
    _same(again, _OBJECT + b".", "an object that was written anew")
    return ok("an object reads back as it was last written, and its ETag changes with it")


def _ranges(store: Scratch) -> Seen:
    place, tag = store.put("ranges")
    answer = store.client.get_object(**place, Range="bytes=100-299", IfMatch=tag)
    _same(answer["Body"].read(), _OBJECT[100:300], "a range")
    if not answer.get("ContentRange", "").startswith("bytes 100-299/"):
        return problem(f"a range comes as {answer.get('ContentRange')!r}", _STORE)
    store.put("ranges", _OBJECT + b".")
    if _refusal(lambda: store.client.get_object(**place, Range="bytes=0-9", IfMatch=tag)) != 412:
        return problem("If-Match lets a range of a replaced object be read", _STORE)
    return ok("bytes 100 to 299 came alone, and If-Match refuses an object that was replaced")


def _multipart(store: Scratch) -> Seen:
    place, first = store.place("parts"), _OBJECT * (_PART // len(_OBJECT))
    began = time.perf_counter()
    with _upload(store, place) as upload:
        parts = [
            store.client.upload_part(**place, UploadId=upload, PartNumber=number, Body=body)
            for number, body in enumerate((first, _OBJECT), start=1)
        ]
        if _refusal(lambda: store.client.head_object(**place)) != 404:
            raise FaultError("an object can be read before its upload is complete", _STORE)
        store.written.add(place["Key"])
        tags = [{"ETag": part["ETag"], "PartNumber": n} for n, part in enumerate(parts, start=1)]
        store.client.complete_multipart_upload(
            **place, UploadId=upload, MultipartUpload={"Parts": tags}
        )
    written = time.perf_counter()
    body = store.client.get_object(**place)["Body"].read()
    _same(body, first + _OBJECT, "an object of two parts")
    rates = len(body) / _MIB / (written - began), len(body) / _MIB / (time.perf_counter() - written)
    return ok("two parts are one object; one stream wrote {:.0f} MiB/s, read {:.0f}".format(*rates))


def _abort(store: Scratch) -> Seen:
    place = store.place("aborted")
    with suppress(_AbortError), _upload(store, place) as upload:
        store.client.upload_part(**place, UploadId=upload, PartNumber=1, Body=_OBJECT)
        raise _AbortError
    found = store.client.list_multipart_uploads(Bucket=store.bucket, Prefix=place["Key"])
    if found.get("Uploads"):
        return problem("the parts of an aborted upload stay, and cost", _STORE)
    return ok("an aborted upload leaves nothing")


def _listing(store: Scratch) -> Seen:
    keys = [store.put(f"listed/{number}")[0]["Key"] for number in range(_LISTED)]
    if store.names("listed") != keys:
        return problem("a listing of several pages lacks what was just written", _STORE)
    shallow = store.client.list_objects_v2(
        Bucket=store.bucket, Prefix=f"{store.prefix}/", Delimiter="/"
    )
    folders = [found["Prefix"] for found in shallow.get("CommonPrefixes", ())]
    if folders != [f"{store.prefix}/listed/"]:
        return problem(f"a listing by delimiter shows the folders {folders}", _STORE)
    doomed = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
    answer = store.client.delete_objects(Bucket=store.bucket, Delete=doomed)
    if refused := answer.get("Errors"):
        saw = f"{len(refused)} of {_LISTED} objects may not be removed: {refused[0]['Code']}"
        return problem(saw, "let the policy of these keys allow s3:DeleteObject")
    if left := store.names("listed"):
        return problem(f"{len(left)} of {_LISTED} removed objects are still listed", _STORE)
    return ok(f"{_LISTED} objects were listed in pages, removed by one request, and gone at once")


def _conditional_writes(store: Scratch) -> Seen:
    place, _ = store.put("once")
    status = _refusal(lambda: store.client.put_object(**place, Body=b"two", IfNoneMatch="*"))
    if status in (409, 412):
        return ok("If-None-Match: * refuses to write over an object")
    return Seen(
        State.NOT_HERE, "the store writes over an object all the same; nothing of ours rests on it"
    )


def _keys(store: Scratch) -> Seen:
    """Return keys of a session end; boto3 renews those that it can fetch again, and no others."""
    keys = store.client._request_signer._credentials
    expires = getattr(keys, "_expiry_time", None)
    if expires is not None:
        return ok(f"keys of a session, renewed before {expires:%Y-%m-%d %H:%M} UTC")
    if keys is not None and keys.token:
        return warning(
            "keys of a session from the environment or a file, which nothing here renews",
            "give a role or a credential_process, which boto3 asks again: long runs outlive them",
        )
    return ok("keys that don't expire")


NEEDS = (
    Need("read and write", "every checkpoint, model and dataset version", _write_and_read),
    Need("ranges", "training reads shards by range, of the version that it verified", _ranges),
    Need("multipart upload", "large files arrive whole or not at all", _multipart),
    Need("aborted upload", "what a killed run had half sent", _abort),
    Need("listing and removal", "resume finds the newest checkpoint; old ones go", _listing),
    Need("conditional write", "two writers can't both win", _conditional_writes),
    Need("expiring keys", "a run of weeks must not end with its keys", _keys),
)
REMOVAL = Need("removal", "what is superseded must not stay and cost", Scratch.remove)


class _AbortError(Exception):
    """What breaks off an upload on purpose."""


@contextmanager
def _upload(store: Scratch, place: dict[str, str]) -> Iterator[str]:
    upload = str(store.client.create_multipart_upload(**place)["UploadId"])
    try:
        yield upload
    except BaseException:
        store.client.abort_multipart_upload(**place, UploadId=upload)
        raise


def _refusal(call: Callable[[], object]) -> int | None:
    """Return the HTTP status of a refusal; None where it was granted."""
    from botocore.exceptions import ClientError

    try:
        call()
    except ClientError as error:
        return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
    return None


def _same(body: bytes, wanted: bytes, what: str) -> None:
    if body != wanted:
        raise FaultError(f"{what} came back changed", "look at proxies and gateways on the way")


_PREFIX = ".penstock-doctor"
_CONTENT = b"penstock doctor"
_REFUSED_S = 15 * 60  # S3 answers RequestTimeTooSkewed beyond (AWS, S3 error responses)
_MUCH_S = 60.0
_TIMEOUT_S = 5
_REMOTE = "PENSTOCK_DATASETS_REMOTE"
_CLOCK = "let this machine's clock follow a time server: chrony"
_ACCESS = "fix AWS_ENDPOINT_URL, the keys, or what their policy allows in this bucket"
_CLOCK_NEED = Need("clock", "requests are signed by the time", lambda _: ok(""))
T = TypeVar("T")


def datasets_remote() -> Iterator[Seen]:
    """Yield the DVC remote of dataset versions: a folder is written to, a bucket is S3's matter."""
    remote = load_settings().datasets_remote
    if remote.startswith("s3://"):
        yield ok(f"{remote} is a bucket: see S3")
        return
    if "://" in remote:
        yield problem(f"{remote} is neither a folder nor s3://", f"fix {_REMOTE}")
        return
    folder = existing(Path(remote))
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(_CONTENT)
            file.flush()
    except OSError as error:
        fix = f"fix its owner, rights or free space, or {_REMOTE}"
        yield problem(f"{folder} can't be written: {error.strerror}", fix)
        return
    made = "" if folder == Path(remote).resolve() else "; the remote is made with the first version"
    yield ok(f"{folder} can be written{made}")


def s3(recipe: Recipe) -> Iterator[Seen]:
    """Yield every place that settings and recipe have in S3."""
    places = {load_settings().datasets_remote, recipe.train.checkpoints or ""}
    places |= {more.place for more in recipe.train.more_checkpoints}
    in_s3 = sorted(place for place in places if place.startswith("s3://"))
    if not in_s3:
        raise NotHereError("neither dataset versions nor checkpoints lie in S3")
    for place in in_s3:
        yield from s3_remote(place)


def s3_remote(remote: str) -> Iterator[Seen]:
    """Yield all that we need of a bucket, in one line where it is well, and the clock."""
    began = time.perf_counter()
    tried = try_store(remote)
    seconds = time.perf_counter() - began
    bad = [seen for _, seen in tried if seen.state in (State.WARNING, State.PROBLEM)]
    done = [need.name for need, seen in tried if seen.state is State.OK]
    yield from bad or [ok(f"{remote}: {', '.join(done)} in {seconds:.2f} s")]


def examine_store(remote: str) -> list[Finding]:
    """Return the same, each need by itself: what `penstock doctor --s3` shows."""
    if not remote.startswith("s3://") or remote == "s3://":
        raise UserError(f"--s3 {remote}: give a bucket, such as s3://bucket/prefix")
    try:
        tried = try_store(remote)
    except NotHereError as error:
        raise UserError(f"--s3 {remote}: {error}") from None
    except FaultError as error:
        why = "every checkpoint, model and dataset version lies there"
        return [Finding("client", State.PROBLEM, str(error), why, error.fix)]
    return [Finding(n.name, seen.state, seen.saw, n.why, seen.fix) for n, seen in tried]


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
    return [*tried, (_CLOCK_NEED, assess_store_clock(dates, time.time()))]


def assess_store_clock(dates: list[str], here: float) -> Seen:
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
        fix = _CLOCK if code == "RequestTimeTooSkewed" else _ACCESS
        raise FaultError(f"{remote}: {what}: {error}", fix) from None
    except (BotoCoreError, ValueError) as error:  # botocore's word for a bad endpoint is ValueError
        raise FaultError(f"{remote}: {what}: {error}", _ACCESS) from None


def _seen(remote: str, need: Need, store: Scratch) -> Seen:
    try:
        seen = _tried(remote, need.name, lambda: need.work(store))
    except FaultError as error:
        return problem(str(error), error.fix)
    return seen if seen.state is State.OK else replace(seen, saw=f"{remote}: {seen.saw}")


def _note_date(dates: list[str], *, http_response: Any, **_: object) -> None:
    dates.extend(filter(None, [http_response.headers.get("date")]))
