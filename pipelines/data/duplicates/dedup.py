"""Pass 2: which documents repeat an earlier one, as tasks that meet in files.

keys of each block ─▶ match: edges of each partition ─▶ join: the documents to drop
"""

from collections.abc import Sequence
from pathlib import Path

from pipelines.core.recipe_cleaning import Dedup
from pipelines.data.duplicates.key_files import read_arrays, write_arrays
from pipelines.data.duplicates.near_duplicates import Duplicates, find_duplicates, match_partition
from pipelines.data.normalize import DUPLICATE, NEAR_DUPLICATE

KEYS_FILE = "keys.safetensors"  # in a block's folder
_DUPLICATES_FILE = "duplicates.safetensors"


def match(
    partition: int, folder: Path, *, partitions: int, blocks: Sequence[Path], dedup: Dedup
) -> str:
    """Compare the documents of all blocks whose keys fall into a partition.

    Returns:
        The name of the file with the edges.
    """
    key_files = [block / KEYS_FILE for block in blocks]
    return match_partition(
        partition, partitions=partitions, key_files=key_files, dedup=dedup, folder=folder
    ).name


def join(edge_files: Sequence[Path], folder: Path) -> int:
    """Write which documents to drop, by their numbers over all blocks.

    Returns:
        How many they are.
    """
    found = find_duplicates(edge_files)
    arrays = {"numbers": found.numbers, "firsts": found.firsts, "exact": found.exact.view("u1")}
    write_arrays(folder / _DUPLICATES_FILE, arrays)
    return len(found.numbers)


def read_duplicates(folder: Path) -> Duplicates:
    """What `join` wrote there, memory-mapped."""
    arrays = read_arrays(folder / _DUPLICATES_FILE)
    return Duplicates(arrays["numbers"], arrays["firsts"], arrays["exact"].view(bool))


def reasons(duplicates: Duplicates, first: int, documents: int) -> dict[int, str]:
    """Why rows are dropped of so many documents, the first of which has the number `first`."""
    rows, exact = duplicates.in_block(first, documents)
    return {
        row: DUPLICATE if is_exact else NEAR_DUPLICATE
        for row, is_exact in zip(rows.tolist(), exact.tolist(), strict=True)
    }
