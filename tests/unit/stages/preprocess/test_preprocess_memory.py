"""Memory is bounded: eight times the text takes no more of it."""

import subprocess
import sys
from pathlib import Path

MEASURED = """
import json, resource, sys
from pathlib import Path

from pipelines.recipe.recipe import Recipe
from pipelines.stages.preprocess import preprocessing

folder, mebibytes = Path(sys.argv[1]), int(sys.argv[2])
filler = "The quick brown fox jumps over the lazy dog. " * 88
with (folder / "corpus.jsonl").open("w") as file:
    for number in range(mebibytes * 256):
        file.write(json.dumps({"text": f"{number} {filler}"}) + "\\n")
recipe = Recipe.model_validate(
    {
        "name": "large",
        "data": {
            "source": {"kind": "files", "path": str(folder / "corpus.jsonl")},
            "tokenizer": {"kind": "bpe", "vocab_size": 500},
            "shard_tokens": 1_000_000,
        },
    }
)
record = preprocessing.run(recipe, folder)
assert record.stats["documents"]["kept"] == mebibytes * 256
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def peak_mebibytes(folder: Path, mebibytes: int) -> float:
    """Of driver and tasks together, as all run in one process here."""
    folder.mkdir()
    command = [sys.executable, "-c", MEASURED, folder, str(mebibytes)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_a_larger_corpus_takes_no_more_memory(tmp_path: Path) -> None:
    small, large = peak_mebibytes(tmp_path / "small", 8), peak_mebibytes(tmp_path / "large", 64)
    assert large < small + 20  # 224 and 227 when it was written
