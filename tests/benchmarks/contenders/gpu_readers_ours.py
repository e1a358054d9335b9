"""One of Penstock's readers, tensor after tensor, a few of them under way at once."""

from collections import deque
from pathlib import Path
from typing import Any

import torch

from pipelines.loading.sources.gpu_readers import open_reader, why_not
from pipelines.loading.sources.readers import Wait, read_whole
from tests.benchmarks.contender import Round, serve

_AHEAD = 4


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    device = torch.device(options["device"])
    size = options["tensor_bytes"]
    # The reader would use pinned buffers instead, and these have a contender of their own.
    if options["reader"] == "gds" and (reason := why_not(folder / options["file"], device)):
        raise SystemExit(f"gds: {reason}")
    places = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_AHEAD)]

    def run_round() -> tuple[float, dict[str, Any]]:
        # A reader a round: what one has mapped can't be dropped from the page cache.
        reader = open_reader([folder / options["file"]], device, options["reader"])
        begun: deque[Wait] = deque()
        for number, offset in enumerate(range(0, options["bytes"], size)):
            if len(begun) == _AHEAD:
                begun.popleft()()
            begun.append(read_whole(reader, 0, offset, places[number % _AHEAD]))
        for wait in begun:
            wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return options["bytes"], {"reader": reader.name}

    return run_round


if __name__ == "__main__":
    serve(prepare)
