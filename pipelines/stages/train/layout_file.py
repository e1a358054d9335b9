"""`layout.json` in a run's workspace: the layout in use, and what was too much for the memory.

No torch here: the driver of a Ray job reads and writes the file, too.
"""

from pathlib import Path
from typing import Any

from pipelines.core.storage import read_json, write_json
from pipelines.recipe.recipe import Recipe

FILE = "layout.json"
LAYOUT = "layout"  # the layout used, as `SettledLayout.facts` returns it
TOO_MUCH = "too_much"  # the computed bytes that were too much for a device, by number of processes
MOST_SAMPLES = "most_samples"  # of a micro-batch, after the memory of a machine ran out
MICRO_BATCH = "train.micro_batch_size"


class LayoutFile:
    """What the tries of a run tell the ones after them."""

    def __init__(self, workspace: Path, recipe: Recipe) -> None:
        """Name the file; the recipe is the run's, whose `auto` values are not replaced yet."""
        self._path = workspace / FILE
        self._recipe = recipe.fingerprint()

    def read(self) -> dict[str, Any]:
        """Return what is known; nothing if the recipe was different."""
        known: dict[str, Any] = read_json(self._path) if self._path.is_file() else {}
        return known if known.get("recipe") == self._recipe else {}

    def write(self, **changes: Any) -> None:
        """Change some of what is known."""
        write_json(self._path, {"recipe": self._recipe} | self.read() | changes)

    def halve_micro_batch(self) -> int | None:
        """Let the next tries take half of the last one's micro-batch, or less if it is odd.

        Returns:
            The samples of a micro-batch from now on; None if they stay as they are: the last try
            had only one, or did not come so far as to take what this allowed it.
        """
        known = self.read()
        took = known.get(LAYOUT, {}).get(MICRO_BATCH, 1)
        if took == 1 or took > known.get(MOST_SAMPLES, took):
            return None
        most = max(size for size in range(1, took // 2 + 1) if not took % size)
        self.write(**{MOST_SAMPLES: most})
        return most
