"""What the passes made becomes the output of preprocess: files, record and statistics."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.storage import write_json, write_text
from pipelines.data.cleaning.cleaner import NGRAMS_FILE, EvaluationSets
from pipelines.data.cleaning.decontaminate import EVALUATION_SETS
from pipelines.data.documents import documents_folder, split_file
from pipelines.data.passes import RESULT
from pipelines.data.selection import Selected, part_files
from pipelines.data.tally import REJECTS, STATS, Tally
from pipelines.data.tokens.assembly import TOKENS
from pipelines.data.tokens.token_shards import LENGTH_HISTOGRAM, dataset_histogram
from pipelines.recipe.data_section import Data
from pipelines.run.records import SPLITS, DatasetRef, Shard, Split


@dataclass(frozen=True)
class Made:
    """The results of the passes, by the folders of their tasks, in order."""

    tally: Tally
    evaluation_sets: EvaluationSets
    parts: dict[Path, Selected]  # a file of each split in each folder
    tokenizer: Path
    token_blocks: dict[str, dict[Path, int]]  # tokens by split
    shards: dict[str, dict[Path, Shard]]  # by split
    left_out: int = 0  # pairs longer than a sample


def publish(made: Made, output: Path) -> None:
    """Give the passes' files their places in the output; hard links, as they are large."""
    documents_folder(output).mkdir(parents=True)
    (output / TOKENS).mkdir()
    for split in SPLITS:
        for number, path in enumerate(part_files(made.parts, split)):
            split_file(documents_folder(output), split, number).hardlink_to(path)
        for folder in made.shards[split]:
            for path in folder.iterdir():
                if path.name != RESULT:
                    (output / TOKENS / path.name).hardlink_to(path)
    for name, folder in made.evaluation_sets:
        target = output / EVALUATION_SETS / f"{name}.npy"
        target.parent.mkdir(exist_ok=True)
        target.hardlink_to(folder / NGRAMS_FILE)
    shutil.copytree(made.tokenizer, output / "tokenizer")


def describe_dataset(made: Made, data: Data, vocab_size: int) -> DatasetRef:
    """Return the dataset's record."""
    splits = {
        name: Split(
            documents=sum(part.documents[name] for part in made.parts.values()),
            bytes=sum(part.bytes[name] for part in made.parts.values()),
            tokens=sum(shard.tokens for shard in made.shards[name].values()),
            shards=tuple(made.shards[name].values()),
        )
        for name in SPLITS
    }
    packed_length = data.sequence_length if data.packing == "best_fit" else None
    return DatasetRef(
        vocab_size=vocab_size,
        packed_length=packed_length,
        pairs=data.instruction.is_preference,
        labelled=data.instruction.kind == "labelled",
        **splits,
    )


def write_statistics(made: Made, data: Data, dataset: DatasetRef, output: Path) -> dict[str, Any]:
    """Write `stats.json` and samples of what was dropped; returns the former."""
    splits = {name: getattr(dataset, name) for name in SPLITS}
    of_text = {name: sum(made.token_blocks[name].values()) for name in SPLITS}  # without padding
    tokens = sum(split.tokens for split in splits.values())
    size = sum(split.bytes for split in splits.values())
    stats = made.tally.to_dict(name for name, _ in made.evaluation_sets) | {
        "tokens": tokens,
        "bytes_per_token": round(size / sum(of_text.values()), 4),
        "packing": {"kind": data.packing, "fill": round(sum(of_text.values()) / tokens, 4)},
        "tokenizer": {"kind": data.tokenizer.kind, "vocab_size": dataset.vocab_size},
        "splits": {
            name: {
                "documents": split.documents,
                "bytes": split.bytes,
                "tokens": split.tokens,
                "bytes_per_token": round(split.bytes / of_text[name], 4),
                "shards": len(split.shards),
            }
            for name, split in splits.items()
        },
    }
    if dataset.pairs:
        stats["left_out_pairs"] = made.left_out
    stats[LENGTH_HISTOGRAM] = dataset_histogram(output, dataset)
    write_json(output / STATS, stats)
    lines = (
        json.dumps({"reason": reason, **reject._asdict()}, ensure_ascii=False) + "\n"
        for reason, rejects in sorted(made.tally.rejects.items())
        for reject in rejects
    )
    write_text(output / REJECTS, "".join(lines))
    return stats
