"""The cache of shards, where several runs need more room than it has."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.loading.sources.object_store import S3Store
from pipelines.loading.sources.readers import Ranges
from pipelines.loading.sources.s3_objects import RemoteFile
from pipelines.loading.sources.shard_cache import ShardCache

SIZE = 20_000


def made(number: int) -> tuple[RemoteFile, bytes]:
    content = np.random.default_rng(number).bytes(SIZE)
    return RemoteFile(hashlib.md5(content, usedforsecurity=False).hexdigest(), "shard"), content


def test_who_makes_room_harms_nobody_who_fetches_or_checks(tmp_path: Path) -> None:
    shards = [made(number) for number in range(40)]

    def use(user: int) -> None:
        cache = ShardCache(tmp_path, 15 * SIZE)
        for turn in range(300):
            file, content = shards[(turn * (2 * user + 1)) % len(shards)]
            cache.get(file, SIZE, lambda opened, content=content: os.write(opened, content))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(use, range(6)))


class Bucket:
    """One object, as `S3Objects` gives it."""

    url = "s3://bucket"

    def stat(self, _file: RemoteFile) -> tuple[int, str]:
        return SIZE, "etag"

    def read(self, _file: RemoteFile, _etag: str, start: int, length: int) -> bytes:
        return made(0)[1][start : start + length]


class CrowdedCache(ShardCache):
    """Another run needs the room as soon as an object has come."""

    others = 0

    def get(self, file: RemoteFile, size: int, download: Callable[[int], Any]) -> Path:
        path = super().get(file, size, download)
        if self.others:
            self.others -= 1
            path.unlink()
        return path


@pytest.mark.parametrize("others", [0, 1, 2])
def test_what_was_driven_out_before_it_was_opened_is_fetched_again(
    tmp_path: Path, others: int
) -> None:
    file, content = made(0)
    cache = CrowdedCache(tmp_path, 10 * SIZE)
    cache.others = others
    reader = S3Store(Bucket(), cache).open([file])  # type: ignore[arg-type]
    out = torch.empty((1, 100), dtype=torch.uint8)
    reader.read(Ranges(np.array([0]), np.array([50]), 100), out)()
    assert out.numpy().tobytes() == content[50:150]


def test_a_cache_too_small_for_all_its_runs_is_one_line(tmp_path: Path) -> None:
    cache = CrowdedCache(tmp_path, 10 * SIZE)
    cache.others = 1000
    with pytest.raises(UserError, match="PENSTOCK_SHARD_CACHE_GB"):
        S3Store(Bucket(), cache).open([made(0)[0]])  # type: ignore[arg-type]
