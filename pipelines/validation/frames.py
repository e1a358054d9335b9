"""What the data gate looks at: one small table of documents, one of shards, one of splits."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from pipelines.core.records import DatasetRef, Shard, Split
from pipelines.data.documents import RowGroup, documents_path, row_groups
from pipelines.data.splitting import SPLITS
from pipelines.data.token_shards import IndexedDataset

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


def document_frame(preprocess: Path) -> "pd.DataFrame":
    """One row a kept document of either split, without its text: no more than one row group of
    text is held at once.

    Columns: split, doc_id and bytes as preprocess wrote them; as found in the text characters and
    text_bytes, null where the text is null; and mistaken_id, a doc_id that is not the text's
    SHA-256, else null.
    """
    import pyarrow as pa

    tables = [
        _measured(group, name)
        for name in SPLITS
        for group in row_groups(documents_path(preprocess, name))
    ]
    # Arrow-backed columns: the ids are not copied into Python objects.
    return pa.concat_tables(tables).to_pandas(types_mapper=_arrow_backed)


def shard_frame(preprocess: Path, dataset: DatasetRef) -> "pd.DataFrame":
    """One row a token shard: what its record says beside what its two files hold.

    Columns: split, shard, recorded_tokens, recorded_bytes, bytes; broken, the reason why the files
    cannot be read as a shard; and, null for a broken one, documents, tokens, shortest_document
    (in tokens), smallest_id, largest_id.
    """
    import pandas as pd

    rows = [
        _shard_row(preprocess, name, shard)
        for name in SPLITS
        for shard in _split(dataset, name).shards
    ]
    return pd.DataFrame(rows, columns=list(_ShardRow.__annotations__))


def split_frame(
    dataset: DatasetRef,
    stats: dict[str, Any],
    documents: "pd.DataFrame",
    shards: "pd.DataFrame",
) -> "pd.DataFrame":
    """One row a split: what its record and the statistics state beside the other frames' sums.

    Columns: split, recorded_documents, recorded_bytes, recorded_tokens; stated_documents,
    stated_bytes, stated_tokens of the statistics, null where they lack the split; documents and
    bytes of text as in the Parquet files; indexed_documents and tokens as in the shards.
    """
    import pandas as pd

    rows = []
    for name in SPLITS:
        split = _split(dataset, name)
        stated = stats.get("splits", {}).get(name, {})
        texts, files = documents[documents["split"] == name], shards[shards["split"] == name]
        rows.append(
            {
                "split": name,
                "recorded_documents": split.documents,
                "recorded_bytes": split.bytes,
                "recorded_tokens": split.tokens,
                "stated_documents": stated.get("documents"),
                "stated_bytes": stated.get("bytes"),
                "stated_tokens": stated.get("tokens"),
                "documents": len(texts),
                "bytes": int(texts["text_bytes"].sum()),
                "indexed_documents": int(files["documents"].sum()),
                "tokens": int(files["tokens"].sum()),
            }
        )
    return pd.DataFrame(rows)


class _ShardRow(TypedDict, total=False):
    split: str
    shard: str
    recorded_tokens: int
    recorded_bytes: int
    bytes: int | None
    broken: str | None
    documents: int
    tokens: int
    shortest_document: int
    smallest_id: int
    largest_id: int


def _shard_row(preprocess: Path, split: str, shard: Shard) -> _ShardRow:
    path = preprocess / shard.path
    row: _ShardRow = {
        "split": split,
        "shard": shard.path,
        "recorded_tokens": shard.tokens,
        "recorded_bytes": shard.bytes,
        "bytes": path.stat().st_size if path.is_file() else None,
    }
    try:
        dataset = IndexedDataset(path.with_suffix(""))
    except (OSError, ValueError) as error:
        return row | _ShardRow(broken=str(error))
    lengths = dataset.document_offsets[1:] - dataset.document_offsets[:-1]
    return row | _ShardRow(
        documents=len(dataset),
        tokens=len(dataset.tokens),
        shortest_document=int(lengths.min(initial=shard.tokens)),
        smallest_id=int(dataset.tokens.min(initial=0)),
        largest_id=int(dataset.tokens.max(initial=0)),
    )


def _split(dataset: DatasetRef, name: str) -> Split:
    split: Split = getattr(dataset, name)
    return split


def _measured(group: RowGroup, split: str) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.compute as pc

    table = group.read("doc_id", "text", "bytes")
    text = table["text"]
    ids = zip(table["doc_id"].to_pylist(), text.to_pylist(), strict=True)
    mistaken = [None if text is None or _sha256(text) == doc_id else doc_id for doc_id, text in ids]
    return pa.table(
        {
            "split": pa.repeat(split, len(table)),
            "doc_id": table["doc_id"],
            "bytes": table["bytes"],
            "characters": pc.utf8_length(text),
            "text_bytes": pc.binary_length(text),
            "mistaken_id": pa.array(mistaken, pa.string()),
        }
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _arrow_backed(kind: "pa.DataType") -> "pd.ArrowDtype":
    import pandas as pd

    return pd.ArrowDtype(kind)
