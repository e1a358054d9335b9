"""What Penstock asks of an object store, each tried for real under a prefix of its own.

The list is made from what the code does: boto3 reads shards by range (`loading/remote.py`), s3fs
writes and prunes checkpoints, DVC pushes dataset versions, MLflow uploads models in parts.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipelines.doctor.findings import FaultError, Seen, State, ok, problem, warning

_CONTENT = bytes(range(256)) * 4
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

    def put(self, name: str, content: bytes = _CONTENT) -> tuple[dict[str, str], str]:
        """Write an object; where it lies, and its ETag."""
        place = self.place(name)
        tag = str(self.client.put_object(**place, Body=content)["ETag"])
        self.written.add(place["Key"])
        return place, tag

    def names(self, folder: str) -> list[str]:
        """All keys below a folder, two at a time, so that pages have to be turned."""
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
    _same(store.client.get_object(**place)["Body"].read(), _CONTENT, "an object")
    found = store.client.head_object(**place)
    if (found["ContentLength"], found["ETag"]) != (len(_CONTENT), tag):
        return problem("HEAD tells another size or ETag than PUT", _STORE)
    _, other = store.put("object", _CONTENT + b".")
    if other == tag:
        return problem("the ETag stays the same when the content changes", _STORE)
    again = store.client.get_object(**place)["Body"].read()
    _same(again, _CONTENT + b".", "an object that was written anew")
    return ok("an object reads back as it was last written, and its ETag changes with it")


def _ranges(store: Scratch) -> Seen:
    place, tag = store.put("ranges")
    answer = store.client.get_object(**place, Range="bytes=100-299", IfMatch=tag)
    _same(answer["Body"].read(), _CONTENT[100:300], "a range")
    if not answer.get("ContentRange", "").startswith("bytes 100-299/"):
        return problem(f"a range comes as {answer.get('ContentRange')!r}", _STORE)
    store.put("ranges", _CONTENT + b".")
    if _refusal(lambda: store.client.get_object(**place, Range="bytes=0-9", IfMatch=tag)) != 412:
        return problem("If-Match lets a range of a replaced object be read", _STORE)
    return ok("bytes 100 to 299 came alone, and If-Match refuses an object that was replaced")


def _multipart(store: Scratch) -> Seen:
    place, first = store.place("parts"), _CONTENT * (_PART // len(_CONTENT))
    began = time.perf_counter()
    with _upload(store, place) as upload:
        parts = [
            store.client.upload_part(**place, UploadId=upload, PartNumber=number, Body=body)
            for number, body in enumerate((first, _CONTENT), start=1)
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
    _same(body, first + _CONTENT, "an object of two parts")
    rates = len(body) / _MIB / (written - began), len(body) / _MIB / (time.perf_counter() - written)
    return ok("two parts are one object; one stream wrote {:.0f} MiB/s, read {:.0f}".format(*rates))


def _abort(store: Scratch) -> Seen:
    place = store.place("aborted")
    with suppress(_AbortError), _upload(store, place) as upload:
        store.client.upload_part(**place, UploadId=upload, PartNumber=1, Body=_CONTENT)
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
    """Keys of a session end; boto3 renews those that it can fetch again, and no others."""
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
    """The HTTP status of a refusal; None where it was granted."""
    from botocore.exceptions import ClientError

    try:
        call()
    except ClientError as error:
        return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
    return None


def _same(body: bytes, wanted: bytes, what: str) -> None:
    if body != wanted:
        raise FaultError(f"{what} came back changed", "look at proxies and gateways on the way")
