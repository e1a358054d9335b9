"""The drive's own rate: O_DIRECT into host memory, eight threads, nothing done with the bytes."""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.benchmarks.contender import Round, serve

_THREADS = 8
_PIECE = 8 << 20


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    descriptor = os.open(folder / options["file"], os.O_RDONLY | os.O_DIRECT)
    buffers = [mmap.mmap(-1, _PIECE) for _ in range(_THREADS)]  # aligned to pages
    pool = ThreadPoolExecutor(_THREADS)

    def read(thread: int) -> int:
        starts = range(thread * _PIECE, options["bytes"], _THREADS * _PIECE)
        return sum(os.preadv(descriptor, [buffers[thread]], start) for start in starts)

    return lambda: sum(pool.map(read, range(_THREADS)))


if __name__ == "__main__":
    serve(prepare)
