"""`layout.json` in a run's workspace: what the tries of a run tell the ones after them.

No torch here: the driver of a Ray job reads and writes the file, too. Its keys are `layout`, the
one used; `flash_attention`, that which `varlen_attn` called instead of torch's own, or null;
`too_much`, the computed bytes that were too much for a device, by number of processes; and
`most_samples` of a micro-batch, after the memory of a machine ran out.
"""

from pathlib import Path
from typing import Any

from pipelines.core.storage import read_json, write_json
from pipelines.recipe.recipe import Recipe

MICRO_BATCH = "train.micro_batch_size"
FLASH = "flash_attention"
LAYOUT = "layout.json"


class LayoutFile:
    """The file of a run, by its recipe before any `auto` is replaced."""

    def __init__(self, workspace: Path, recipe: Recipe) -> None:
        self._path = workspace / LAYOUT
        self._recipe = recipe.fingerprint()

    def read(self) -> dict[str, Any]:
        """Return what is known; nothing if the recipe was different."""
        known: dict[str, Any] = read_json(self._path) if self._path.is_file() else {}
        return known if known.get("recipe") == self._recipe else {}

    def write(self, **changes: Any) -> None:
        """Change some of what is known."""
        write_json(self._path, self.read() | {"recipe": self._recipe} | changes)

    def halve_micro_batch(self) -> int | None:
        """Return how much the next tries may take, or None if that stays as it is.

        It stays if the last try took one sample, or ended before it took as much as it may.
        """
        known = self.read()
        took = known.get("layout", {}).get(MICRO_BATCH, 1)
        if took == 1 or took > known.get("most_samples", took):
            return None
        most = max(size for size in range(1, took // 2 + 1) if not took % size)
        self.write(most_samples=most)
        return most
