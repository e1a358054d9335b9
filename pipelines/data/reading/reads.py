"""What is read in one go, and how its bytes are opened."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from pipelines.core.errors import UserError
from pipelines.data.reading.remote import RemoteError
from pipelines.data.reading.sources import open_input

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class Read:
    """One input, or a part of one."""

    path: str  # as documents name it
    url: str
    format: str
    start: int = 0  # byte of a text or JSONL file; row group of a Parquet file; shard of a dataset
    stop: int | None = None
    line: int | None = 1  # of the first record, counted from 1; None where nobody counted
    bytes: int = 0  # on disk: the task's weight
    cut: str = "large"  # which text files are cut: `never`, `large`, `always`


def compression_of(path: str) -> str | None:
    """`gzip` or `zstd`, by a file's name."""
    name = path.lower()
    return next((kind for suffix, kind in COMPRESSIONS.items() if name.endswith(suffix)), None)


@contextmanager
def decompressed(read: Read) -> Iterator[IO[bytes]]:
    """Open an input's content; a broken archive is a person's mistake and names the file."""
    compression = compression_of(read.path)
    with open_input(read.url, read.stop) as raw:
        if compression is None:
            yield raw
            return
        import pyarrow as pa

        try:
            # Unlike zstandard's own reader, pyarrow's notices a truncated file.
            stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)
            yield io.BufferedReader(stream)
        except RemoteError:
            raise
        except OSError as error:
            raise UserError(f"{read.url}: not a whole {compression} file ({error})") from error
