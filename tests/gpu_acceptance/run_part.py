"""`python -m tests.gpu_acceptance.run_part NAME`: one part; its place comes as JSON on stdin.

What the part found is written into the folder of its place. A part whose starter ends, ends too,
with its children.
"""

import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines.core.storage import write_json
from tests.gpu_acceptance.acceptance_parts import Place, named


def main() -> None:
    """Run the part that argv names."""
    given: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_starter, daemon=True).start()
    from pipelines.parallel.process_group import process_group

    with process_group() as device:
        if device.type != "cuda" and not given["fake"]:
            raise SystemExit("torch sees no CUDA GPU here")
        place = Place(Path(given["folder"]), str(device), given["fake"], given["earlier"])
        outcome = named(sys.argv[1]).function()(place)
        write_json(place.folder / "outcome.json", asdict(outcome))


def _end_with_starter() -> None:
    """Wait for the end of stdin, which comes when the process that started this one is gone.

    `sys.stdin.read` would hold a lock, and a forked process that closes its stdin, as a worker of a
    `DataLoader` does, would wait for it for ever.
    """
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
