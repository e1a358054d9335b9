"""Finds and verifies a split's files, in a folder or by content hash in a remote."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, Protocol

import torch

from pipelines.core.errors import UserError
from pipelines.core.storage import md5
from pipelines.data.tokens.token_shards import idx_path, mask_path, shard_prefix
from pipelines.loading.sources.gpu_readers import LocalKind, open_reader
from pipelines.loading.sources.object_store import open_store
from pipelines.loading.sources.readers import Reader
from pipelines.loading.sources.s3_objects import RemoteFile
from pipelines.run.records import Shard, Split

ReaderKind = LocalKind | Literal["object_store"]


class ShardFiles(Protocol):
    """The verified files of a split.

    Attributes:
        indexes: The `.idx` file of each shard, on a local disk.
    """

    indexes: list[Path]

    def open(self, device: torch.device) -> Reader:
        """Return a reader of all shards' token files, then of their loss masks, if any."""
        ...


def find(
    folder: Path,
    split: Split,
    reader: ReaderKind = "auto",
    remote: str | None = None,
    part: tuple[int, int] = (0, 1),
) -> ShardFiles:
    """Return the files of a split under `folder`, or those of the remote that it was pushed to.

    Args:
        folder: The shards' paths are relative to it.
        split: Names the shards and their hashes.
        reader: `object_store` streams from the remote; so does `auto` if local files are missing.
        remote: A DVC remote: a folder or an s3:// URL.
        part: (rank, world) of processes that share the folder and end together if one finds a
            damaged shard. Each verifies only every `world`-th local shard.

    Raises:
        UserError: a file is missing, or differs from what was written.
    """
    if reader == "object_store":
        if remote is None:
            raise UserError(
                "data.reader = 'object_store': the dataset was never pushed to a remote; "
                "set data.reader to auto, or data.source to a version of `penstock data list`"
            )
        return RemoteShards(remote, split)
    is_here = all((folder / shard.path).is_file() for shard in split.shards)
    if reader == "auto" and remote and not is_here:
        return RemoteShards(remote, split)
    return LocalShards(folder, split, reader, part)


class LocalShards:
    """Shards in a folder."""

    def __init__(self, folder: Path, split: Split, reader: LocalKind, part: tuple[int, int]):
        tokens = [folder / shard.path for shard in split.shards]
        masks = [_mask(folder, shard) for shard in split.shards if shard.mask_md5]
        self.indexes = [_index(folder, shard) for shard in split.shards]
        self._paths = tokens + masks
        self._reader = reader
        for path in tokens + masks + self.indexes:
            if not path.is_file():
                raise UserError(f"{path}: a token shard's file is missing; run preprocess again")
        verify(folder, split.shards[part[0] :: part[1]])

    def open(self, device: torch.device) -> Reader:
        """See `ShardFiles`."""
        return open_reader(self._paths, device, self._reader)


class RemoteShards:
    """Shards in a DVC remote; a fetched file is verified before its first use."""

    def __init__(self, remote: str, split: Split) -> None:
        self._store = open_store(remote)
        self._files = [RemoteFile(shard.md5, shard.path) for shard in split.shards]
        self._files += [
            RemoteFile(shard.mask_md5, f"the loss mask of {shard.path}")
            for shard in split.shards
            if shard.mask_md5
        ]
        self.indexes = self._store.fetch(
            [RemoteFile(shard.index_md5, f"the index of {shard.path}") for shard in split.shards]
        )

    def open(self, device: torch.device) -> Reader:
        """See `ShardFiles`."""
        del device  # a reader through host memory works for every device
        return self._store.open(self._files)


def verify(folder: Path, shards: Sequence[Shard]) -> None:
    """Check that shards' files match the hashes in their records, with a thread per processor.

    Raises:
        UserError: a file differs from what was written.
    """
    wanted: list[tuple[Path, str]] = []
    for shard in shards:
        wanted.append((folder / shard.path, shard.md5))
        wanted.append((_index(folder, shard), shard.index_md5))
        if shard.mask_md5:
            wanted.append((_mask(folder, shard), shard.mask_md5))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing releases the interpreter's lock
        for _ in pool.map(lambda each: _verify_file(*each), wanted):
            pass


def _verify_file(path: Path, written: str) -> None:
    found = md5(path)
    if found != written:
        raise UserError(
            f"{path}: the file's md5 is {found}, but {written} was written; it is damaged: "
            "delete it and run preprocess again"
        )


def _index(folder: Path, shard: Shard) -> Path:
    return idx_path(shard_prefix(folder / shard.path))


def _mask(folder: Path, shard: Shard) -> Path:
    return mask_path(shard_prefix(folder / shard.path))
