"""Shards from a DVC remote: a folder, or a real S3 server behind a proxy that misbehaves."""

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.loading.dataloader import TokenLoader
from pipelines.loading.sources import object_store, s3_objects, shard_cache
from pipelines.loading.sources.object_store import S3Store, open_store
from pipelines.loading.sources.s3_objects import RemoteFile, S3Objects, object_path
from pipelines.loading.sources.shard_cache import ShardCache
from pipelines.loading.token_dataset import TokenDataset
from pipelines.run.records import Split
from tests.s3_server import s3_bucket
from tests.unit.loading.misbehaving_proxy import FAULTS, STALL_SECONDS, MisbehavingProxy

URL = "s3://store/dvc"
BATCH = 4


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    with s3_bucket("store") as made:
        yield made


@pytest.fixture
def proxy(bucket: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    made = MisbehavingProxy(bucket.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
    monkeypatch.setenv(shard_cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(s3_objects, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(object_store, "PIECE", 2048)  # a shard is several requests
    monkeypatch.setattr(object_store, "_BLOCK", 512)
    yield made
    made.close()


@pytest.fixture
def split(tmp_path: Path, write_split: Callable[..., Split]) -> Split:
    ids = np.random.default_rng(3).integers(0, 60_000, 6000)
    parts = np.split(ids, [3500])
    masks = [np.arange(len(part)) % 3 > 0 for part in parts]
    return write_split([[[part]] for part in parts], masks=masks)


def objects(folder: Path, split: Split) -> Iterator[tuple[str, Path]]:
    for shard in split.shards:
        yield shard.md5, folder / shard.path
        yield shard.index_md5, (folder / shard.path).with_suffix(".idx")
        if shard.mask_md5:
            yield shard.mask_md5, (folder / shard.path).with_suffix(".mask")


@pytest.fixture
def pushed(bucket: Any, tmp_path: Path, split: Split) -> Split:
    for digest, path in objects(tmp_path, split):
        bucket.upload_file(str(path), f"dvc/{object_path(digest)}")
    return split


def batches(dataset: TokenDataset, steps: int = 2) -> tuple[str, list[Any]]:
    """The reader's name, and what some steps deliver."""
    loader = TokenLoader(
        dataset,
        seed=1,
        global_batch=BATCH,
        micro_batch=5,
        dp_rank=0,
        dp_world=1,
        device=torch.device("cpu"),
        steps=steps,
    )
    found = [
        (batch.inputs_BS.tolist(), batch.targets_BS.tolist())
        for step in range(steps)
        for batch, _ in loader.micro_batches(step)
    ]
    return loader.reader.name, found


def streamed(split: Split, url: str = URL) -> tuple[str, list[Any]]:
    return batches(TokenDataset(Path("absent"), split, 64, reader="object_store", remote=url))


def no_room(monkeypatch: pytest.MonkeyPatch, split: Split) -> None:
    """For the indexes and one shard only."""
    monkeypatch.setenv(shard_cache.SIZE_VARIABLE, str((split.shards[0].bytes + 1000) / 1e9))


# What is streamed is what lies in the folder.


def test_from_s3_through_the_cache(proxy: Any, pushed: Split, tmp_path: Path) -> None:
    local = batches(TokenDataset(tmp_path, pushed, 64))[1]
    assert streamed(pushed) == (f"object_store ({URL}, cached)", local)
    proxy.fault = lambda _path, _number: "500"  # a second run needs nothing of S3 but its stat
    assert streamed(pushed)[1] == local


def test_from_s3_without_room(
    proxy: Any, pushed: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room(monkeypatch, pushed)
    local = batches(TokenDataset(tmp_path, pushed, 64))[1]
    name, found = streamed(pushed)
    assert name == f"object_store ({URL}, 3 of 4 files not cached)"
    assert found == local
    assert cache_bytes(tmp_path / "cache") <= pushed.shards[0].bytes + 1000


def test_from_a_folder(tmp_path: Path, split: Split) -> None:
    local = batches(TokenDataset(tmp_path, split, 64))[1]
    for digest, path in objects(tmp_path, split):
        target = tmp_path / "remote" / object_path(digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    assert streamed(split, str(tmp_path / "remote"))[1] == local
    assert streamed(split, f"file://{tmp_path / 'remote'}")[1] == local
    flip(tmp_path / "remote" / object_path(split.shards[1].md5))
    with pytest.raises(UserError, match=r"train-00001\.bin is damaged"):
        streamed(split, str(tmp_path / "remote"))


def test_auto_streams_what_is_not_here(tmp_path: Path, proxy: Any, pushed: Split) -> None:
    here = TokenDataset(tmp_path, pushed, 64, remote=URL)
    assert batches(here)[0] == "mmap"
    absent = TokenDataset(tmp_path / "absent", pushed, 64, remote=URL)
    assert batches(absent)[0] == f"object_store ({URL}, cached)"


# The world goes wrong: tried again, or one clear line.


@pytest.mark.parametrize(
    ("fault", "cached"),
    # A whole shard that is garbled is refused, below.
    [(fault, cached) for fault in FAULTS for cached in (True, False) if fault != "garbled"]
    + [("garbled", False)],
)
def test_a_fault_that_passes_is_tried_again(
    proxy: Any,
    pushed: Split,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    cached: bool,
) -> None:
    """The first two requests of each object go wrong, and each tenth after that."""
    if fault == "stalled":
        monkeypatch.setattr(s3_objects, "_READ_TIMEOUT", STALL_SECONDS / 2)
    if not cached:
        no_room(monkeypatch, pushed)
    local = batches(TokenDataset(tmp_path, pushed, 64))[1]
    verified: list[int] = []

    def sometimes(_path: str, number: int) -> str | None:
        if fault == "garbled" and not verified:
            return None  # only what is read after the whole was checked
        return fault if number < 2 or (number % 10 == 0 and fault != "stalled") else None

    proxy.fault = sometimes
    dataset = TokenDataset(Path("absent"), pushed, 64, reader="object_store", remote=URL)
    opened = dataset.open(torch.device("cpu"))
    verified.append(1)
    dataset.open = lambda _device: opened  # type: ignore[method-assign]
    assert batches(dataset)[1] == local


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("cached", [True, False])
def test_a_fault_that_stays_is_one_line(
    proxy: Any, pushed: Split, monkeypatch: pytest.MonkeyPatch, fault: str, cached: bool
) -> None:
    monkeypatch.setattr(s3_objects, "_TRIES", 2)
    if fault == "stalled":
        monkeypatch.setattr(s3_objects, "_READ_TIMEOUT", STALL_SECONDS / 2)
    bad = f"/store/dvc/{object_path(pushed.shards[1].md5)}"
    if not cached:
        no_room(monkeypatch, pushed)
    proxy.fault = lambda path, _number: fault if path == bad else None
    with pytest.raises(UserError, match=r"train-00001\.bin") as raised:
        streamed(pushed)
    assert "\n" not in str(raised.value)


def test_garbled_after_it_was_verified(
    proxy: Any, pushed: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same ETag, same length, other bytes: the checksums of blocks find it."""
    monkeypatch.setattr(s3_objects, "_TRIES", 2)
    no_room(monkeypatch, pushed)
    dataset = TokenDataset(Path("absent"), pushed, 64, reader="object_store", remote=URL)
    reader = dataset.open(torch.device("cpu"))
    dataset.open = lambda _device: reader  # type: ignore[method-assign]
    proxy.fault = lambda _path, _number: "garbled"
    with pytest.raises(UserError, match=r"train-0000[01]\.bin .* another checksum"):
        batches(dataset)


def test_replaced_after_it_was_verified(
    bucket: Any, proxy: Any, pushed: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room(monkeypatch, pushed)
    dataset = TokenDataset(Path("absent"), pushed, 64, reader="object_store", remote=URL)
    reader = dataset.open(torch.device("cpu"))
    dataset.open = lambda _device: reader  # type: ignore[method-assign]
    for shard in pushed.shards:
        bucket.put_object(Key=f"dvc/{object_path(shard.md5)}", Body=bytes(shard.bytes))
    with pytest.raises(UserError, match=r"\.bin .* was replaced while it was read"):
        batches(dataset)


@pytest.mark.parametrize("cached", [True, False])
def test_another_object_under_its_name(
    bucket: Any, proxy: Any, pushed: Split, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    if not cached:
        no_room(monkeypatch, pushed)
    shard = pushed.shards[1]
    bucket.put_object(Key=f"dvc/{object_path(shard.md5)}", Body=bytes(shard.bytes))
    with pytest.raises(UserError, match=r"train-00001\.bin.* damaged") as raised:
        streamed(pushed)
    assert "\n" not in str(raised.value)


def test_an_absent_object_and_an_absent_bucket(bucket: Any, proxy: Any, pushed: Split) -> None:
    with pytest.raises(UserError, match=r"no-such-bucket.*is missing"):
        streamed(pushed, "s3://no-such-bucket/dvc")
    bucket.Object(f"dvc/{object_path(pushed.shards[0].index_md5)}").delete()
    with pytest.raises(UserError, match=r"index of train-00000\.bin .* is missing; push"):
        streamed(pushed)


def test_no_remote_and_an_unknown_kind_of_remote(pushed: Split) -> None:
    with pytest.raises(UserError, match="never pushed to a remote"):
        TokenDataset(Path("absent"), pushed, 64, reader="object_store")
    with pytest.raises(UserError, match="ftp://x: shards can be streamed from"):
        streamed(pushed, "ftp://x")


# The cache.


def cache_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("files/md5/*/*"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def files_of(split: Split) -> list[RemoteFile]:
    return [RemoteFile(shard.md5, shard.path) for shard in split.shards]


def test_a_damaged_cached_shard_is_fetched_again(proxy: Any, pushed: Split, tmp_path: Path) -> None:
    local = batches(TokenDataset(tmp_path, pushed, 64))[1]
    streamed(pushed)
    flip(tmp_path / "cache" / object_path(pushed.shards[0].md5))
    assert streamed(pushed)[1] == local


def test_a_full_drive_costs_no_token(
    proxy: Any, pushed: Split, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A real ENOSPC: the file that the download goes to is /dev/full."""
    local = batches(TokenDataset(tmp_path, pushed, 64))[1]
    path = tmp_path / "cache" / object_path(pushed.shards[1].md5)
    path.parent.mkdir(parents=True)
    path.with_name(path.name + ".part").symlink_to("/dev/full")
    name, found = streamed(pushed)
    assert name == f"object_store ({URL}, 1 of 4 files not cached)"
    assert found == local
    assert "No space left on device" in caplog.text


def test_no_room_for_an_index_is_one_line(proxy: Any, pushed: Split, tmp_path: Path) -> None:
    path = tmp_path / "cache" / object_path(pushed.shards[1].index_md5)
    path.parent.mkdir(parents=True)
    path.with_name(path.name + ".part").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"no room in the shard cache: .*No space left"):
        streamed(pushed)


def test_what_was_not_used_for_longest_goes_first(
    proxy: Any, pushed: Split, tmp_path: Path
) -> None:
    masks = [RemoteFile(str(shard.mask_md5), "a mask") for shard in pushed.shards]
    files = [*masks, files_of(pushed)[1]]
    sizes = [3500, 2500, pushed.shards[1].bytes]
    cache = ShardCache(tmp_path / "cache", sum(sizes) - 1)
    store = S3Store(S3Objects(URL), cache)
    for number in (0, 1, 0, 2):
        store.fetch([files[number]])
    kept = [(tmp_path / "cache" / object_path(file.md5)).exists() for file in files]
    assert kept == [True, False, True]
    assert cache_bytes(tmp_path / "cache") <= cache.limit


def test_many_that_want_one_shard_download_it_once(
    proxy: Any, pushed: Split, tmp_path: Path
) -> None:
    """Each with a store of its own, as processes of a machine have."""
    file = files_of(pushed)[0]
    barrier = threading.Barrier(4)

    def fetch(_number: int) -> bytes:
        store = open_store(URL)
        barrier.wait()
        return store.fetch([file])[0].read_bytes()

    with ThreadPoolExecutor(4) as pool:
        contents = set(pool.map(fetch, range(4)))
    assert contents == {(tmp_path / pushed.shards[0].path).read_bytes()}
    assert sum(proxy.gets.values()) == -(-pushed.shards[0].bytes // object_store.PIECE)


def test_what_a_killed_process_left_is_written_over(
    proxy: Any, pushed: Split, tmp_path: Path
) -> None:
    local = batches(TokenDataset(tmp_path, pushed, 64))[1]
    path = tmp_path / "cache" / object_path(pushed.shards[1].md5)
    path.parent.mkdir(parents=True)
    path.with_name(path.name + ".part").write_bytes(b"half")
    assert streamed(pushed)[1] == local
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_a_bad_cache_setting_is_one_line(
    proxy: Any, pushed: Split, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(shard_cache.SIZE_VARIABLE, "much")
    with pytest.raises(UserError, match="PENSTOCK_SHARD_CACHE_GB='much': not a number"):
        streamed(pushed)
    monkeypatch.delenv(shard_cache.SIZE_VARIABLE)
    (tmp_path / "file").touch()
    monkeypatch.setenv(shard_cache.FOLDER_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"PENSTOCK_SHARD_CACHE=.* can't be used"):
        streamed(pushed)
