"""Reads Hugging Face datasets with the `datasets` library, as a stream and without remote code.

A folder or a dataset of the hub is read shard by shard; the library makes a shard of each of its
files. A dataset that `save_to_disk` wrote is read by ranges of rows.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError
from pipelines.data.normalize import Document
from pipelines.data.reading.inputs import LOCAL, Input
from pipelines.data.reading.instruction import Fields, record_document

SHARD_ROWS = 4096  # rows that count as a shard of a saved dataset
_BATCH_ROWS = 256
_SAVED = ("dataset_dict.json", "state.json")  # files that `save_to_disk` writes
_REVISION = "@"


def hub_input(name: str, revision: str | None) -> Input:
    """Return a dataset of the hub with its commit, which all later reads use.

    Raises:
        UserError: The hub has no such dataset or revision.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        found = HfApi().dataset_info(name, revision=revision, files_metadata=True)
    except (HfHubHTTPError, HFValidationError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{name}: neither a folder nor a dataset of the hub ({reason}); "
            "fix data.source.path or data.source.revision"
        ) from error
    size = sum(file.size or 0 for file in found.siblings or ())
    return Input(name, f"{name}{_REVISION}{found.sha}", size, (("revision", str(found.sha)),))


def root_of(found: Sequence[Input], path: str) -> str:
    """Return the local folder or the hub's `name@commit`, for the library to open."""
    folder = Path(path.removeprefix(LOCAL)).expanduser()
    return str(folder.absolute()) if folder.is_dir() else found[0].url


def shard_count(root: str, split: str) -> int:
    """Return how many parts of a split can be read separately.

    Raises:
        UserError: The library finds no dataset there, or no such split.
    """
    dataset = _open(root, split)
    if _is_saved(root):
        return -(-len(dataset) // SHARD_ROWS)
    return int(dataset.num_shards)


def documents(root: str, split: str, shard: int, fields: Fields) -> Iterator[Document]:
    """Yield the documents of one shard, in order, named `split:row` or `split/shard:row`.

    Raises:
        UserError: The dataset lacks a column.
    """
    for source, record in _records(root, split, shard, fields):
        yield record_document(source, 0, record, fields)


def _records(
    root: str, split: str, shard: int, fields: Fields
) -> Iterator[tuple[str, dict[str, Any]]]:
    dataset = _open(root, split)
    chosen = dataset
    if dataset.column_names is not None:  # None if only reading shows the columns
        columns = fields.find_columns(root.partition(_REVISION)[0], dataset.column_names)
        chosen = dataset.select_columns(columns)
    if _is_saved(root):
        start = shard * SHARD_ROWS
        part = chosen.select(range(start, min(start + SHARD_ROWS, len(dataset))))
        label, row = split, start
    else:
        part = chosen.shard(dataset.num_shards, shard)
        label, row = f"{split}/{shard}", 0
    for table in part.with_format("arrow").iter(_BATCH_ROWS):
        for record in table.to_pylist():
            row += 1
            yield f"{label}:{row}", record


def _is_saved(root: str) -> bool:
    return any((Path(root) / name).is_file() for name in _SAVED)


@lru_cache(maxsize=4)
def _open(root: str, split: str) -> Any:
    """Return the split: rows on disk if `save_to_disk` wrote it, else a stream."""
    import datasets

    name, _, commit = root.partition(_REVISION)
    try:
        if _is_saved(root):
            found = datasets.load_from_disk(root)
            return found[split] if isinstance(found, datasets.DatasetDict) else found
        if Path(root).is_dir():
            return datasets.load_dataset(root, split=split, streaming=True)
        return datasets.load_dataset(name, split=split, revision=commit, streaming=True)
    except KeyError as error:
        raise UserError(
            f"{root}: no split {split!r} among {', '.join(found)}; set data.source.split"
        ) from error
    except (FileNotFoundError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{root}: `datasets` cannot read it: {reason}") from error
