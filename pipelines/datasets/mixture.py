"""Several dataset versions that are trained on together: what they share, and one record of all.

Each lies whole, as it was published, in a folder of its own below the output of *preprocess*.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.datasets.dvc_objects import ObjectStore
from pipelines.datasets.versions import DatasetVersion, find
from pipelines.recipe.data_section import Source
from pipelines.run.records import SPLITS, DatasetRef, MixturePart, PreprocessRecord, Split

TOKENIZER = "tokenizer"  # in a version's tree
Weighted = tuple[DatasetVersion, int]  # a version and its weight


def find_mixture(source: Source) -> list[Weighted]:
    """Return the versions of a mixture, by label, each with its weight.

    Raises:
        UserError: one does not exist or is named twice, or two can't be trained on together.
    """
    mixed = [(find(label), weight) for label, weight in source.weights.items()]
    labels = Counter(version.label for version, _ in mixed)
    if twice := next((label for label, times in labels.items() if times > 1), None):
        raise UserError(f"data.source.mixture names {twice} twice; name it once")
    mixed.sort(key=lambda each: each[0].label)
    _refuse_mismatch([version for version, _ in mixed])
    return mixed


def describe_mixture(mixed: Sequence[Weighted], fetched: Sequence[DatasetRef]) -> DatasetRef:
    """Return the record of all datasets together.

    Args:
        mixed: The versions and their weights.
        fetched: What the record of each says, once it lies here.
    """
    parts = tuple(
        MixturePart(
            name=version.name,
            version=version.version,
            git_revision=version.git_revision,
            directory_hash=version.directory_hash,
            weight=weight,
            shards=len(dataset.train.shards),
            data=version.recipe["data"],
        )
        for (version, weight), dataset in zip(mixed, fetched, strict=True)
    )
    splits = {
        name: _together(
            [(part.folder, getattr(each, name)) for part, each in zip(parts, fetched, strict=True)]
        )
        for name in SPLITS
    }
    first = fetched[0]
    return DatasetRef(
        remote=first.remote,
        vocab_size=first.vocab_size,
        packed_length=first.packed_length,
        pairs=first.pairs,
        labelled=first.labelled,
        mixture=parts,
        **splits,
    )


def add_statistics(records: Sequence[PreprocessRecord]) -> dict[str, Any]:
    """Return what became of the documents of all datasets; each one's own statistics lie in its
    folder.
    """
    counts = [record.stats["documents"] for record in records]
    dropped: Counter[str] = sum((Counter(each["dropped"]) for each in counts), Counter())
    return {
        "documents": {
            "in": sum(each["in"] for each in counts),
            "kept": sum(each["kept"] for each in counts),
            "dropped": dict(sorted(dropped.items())),
        }
    }


def _together(splits: Sequence[tuple[str, Split]]) -> Split:
    """Return one split of the datasets that lie in these folders."""
    return Split(
        documents=sum(split.documents for _, split in splits),
        bytes=sum(split.bytes for _, split in splits),
        tokens=sum(split.tokens for _, split in splits),
        shards=tuple(
            shard.model_copy(update={"path": f"{folder}/{shard.path}"})
            for folder, split in splits
            for shard in split.shards
        ),
    )


def _refuse_mismatch(versions: Sequence[DatasetVersion]) -> None:
    """One model reads all the tokens: they must mean the same, and lie alike."""
    store = ObjectStore(load_settings().datasets_remote)
    first, *others = versions
    expected = _format(store, first)
    for other in others:
        for what, value in _format(store, other).items():
            if value != expected[what]:
                raise UserError(
                    f"data.source.mixture: {first.label} and {other.label} differ in their {what} "
                    f"({expected[what]}, {value}); make one again as the other was made"
                )


def _format(store: ObjectStore, version: DatasetVersion) -> dict[str, str]:
    """Return what must be the same, in words; the tokenizer by the content of its files."""
    dataset = version.dataset
    files = store.listing(version.directory_hash)
    tokenizer = sorted((file.path, file.oid) for file in files if _is_tokenizers(file.path))
    length = dataset.packed_length
    masked = any(shard.mask_md5 for shard in dataset.train.shards)
    return {
        "vocabulary size": str(dataset.vocab_size),
        "tokenizer": hashlib.sha256(json.dumps(tokenizer).encode()).hexdigest()[:12],
        "packing": "end to end" if length is None else f"best fit of {length}",
        "loss mask": "one" if masked else "none",
        "documents": dataset.contents,
    }


def _is_tokenizers(path: str) -> bool:
    return path.startswith(f"{TOKENIZER}/")
