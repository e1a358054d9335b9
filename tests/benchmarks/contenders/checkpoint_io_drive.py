"""The drive's own rate with O_DIRECT: read by eight threads, or written and synced."""

import mmap
import os
from pathlib import Path
from typing import Any

from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders import gpu_readers_drive

_PIECE = 8 << 20


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    if options["reader"]:
        return gpu_readers_drive.prepare(folder, options)
    buffer = mmap.mmap(-1, _PIECE)  # aligned to pages
    buffer.write(os.urandom(_PIECE))
    path = folder / "drive.bin"

    def write() -> float:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        for start in range(0, options["bytes"], _PIECE):
            left = min(_PIECE, options["bytes"] - start)
            os.pwrite(descriptor, memoryview(buffer)[:left], start)
        os.fsync(descriptor)
        os.close(descriptor)
        return options["bytes"]

    return write


if __name__ == "__main__":
    serve(prepare)
