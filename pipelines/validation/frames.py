"""What the data gate looks at: tables of documents, of a sample of texts, of shards, of splits.

Which documents the costly checks look at: chosen by content, so alike in every run.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipelines.data.documents import (
    SCHEMA,
    RowGroup,
    documents_folder,
    load_messages,
    row_groups,
    split_files,
)
from pipelines.data.duplicates.shingles import mix, shingles, words
from pipelines.data.normalize import Messages, pair_fault, shared_turns, single_answer
from pipelines.data.reading.instruction import ASSISTANT
from pipelines.data.tokens.token_shards import ShardIndex, document_lengths, idx_path, shard_prefix
from pipelines.recipe.recipe import Validation
from pipelines.run.records import SPLITS, DatasetRef, Split, uniform

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_SHINGLE_WORDS = 5


def content_draws(texts: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each text, shape [texts]; those below f are a sample of
    fraction f.

    It is the MinHash of the text by one hash function (Broder 1997), mixed again so that it is
    uniform whatever the text's length: two texts that share a part j of their shingles have the
    same number with probability j, so near-duplicates are mostly taken or left together, and their
    rate in the sample is about that of all texts. Some 400 MB of text a second.
    """
    hashes, offsets = shingles(*words(texts), _SHINGLE_WORDS)
    smallest = np.empty(len(texts), np.uint64)
    has_words = offsets[1:] > offsets[:-1]
    if has_words.any():
        smallest[has_words] = np.minimum.reduceat(hashes, offsets[:-1][has_words])
    for index in np.flatnonzero(~has_words).tolist():  # such as a row of dashes
        smallest[index] = int.from_bytes(hashlib.sha256(texts[index].encode()).digest()[:8])
    draws: npt.NDArray[np.float64] = mix(smallest) / 2.0**64
    return draws


MAX_ROWS = 1_000_000  # of the documents' frame: about 0.5 GB and 20 s of expectations
SAMPLE_CHARACTERS = 50_000  # of a sampled text at most
_READ = ("doc_id", "bytes", "source", "text", "messages", "rejected")


@dataclass(frozen=True)
class Documents:
    """The kept documents of both splits, measured in one pass.

    Attributes:
        frame: one row a document, without its text, in the order of the files; of more than
            `MAX_ROWS` documents about so many, chosen by doc_id, so that equal ones stay together,
            and each that is wrong by itself: no document escapes what is asked of every row.
            Columns: split, doc_id and bytes as preprocess wrote them; as found in the text
            characters and text_bytes, null where the text is null; mistaken_id, a doc_id that is
            not the text's SHA-256, else null; group, the row group in `groups`. Of pairs also
            pair_fault, why one teaches no preference, else null; single, of an answer by itself
            which of the two it is, else null; chosen_characters and rejected_characters, of what
            the assistant says after they part, null of an answer that is not there; chosen_longer,
            1 where that answer is, else 0, and of a single chosen answer the share of single
            rejected ones that are shorter.
        sample: one row a sampled document, chosen by `content_draws`. Columns: split, doc_id,
            source, text (its first `SAMPLE_CHARACTERS`), messages (null but of conversations; of a
            single answer the one with it, whatever its label), rejected (null but of pairs).
        splits: of each split, documents and bytes of text.
        groups: all row groups.
    """

    frame: "pd.DataFrame"
    sample: "pd.DataFrame"
    splits: dict[str, tuple[int, int]]
    groups: list[RowGroup]

    @property
    def total(self) -> int:
        """Documents of both splits."""
        return sum(documents for documents, _ in self.splits.values())


def measure_documents(
    preprocess: Path, demands: Validation, datasets: int = 1, *, pairs: bool = False
) -> Documents:
    """Read every document once; no more than one row group of text, and the sample, are held.

    So many datasets share the `MAX_ROWS` rows of their frames; `pairs` says what a document is.
    """
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    paths = {name: split_files(documents_folder(preprocess), name) for name in SPLITS}
    groups = [(name, group) for name in SPLITS for group in row_groups(paths[name])]
    rows = sum(pq.read_metadata(path).num_rows for name in SPLITS for path in paths[name])
    totals = dict.fromkeys(SPLITS, (0, 0))
    measured = [_measured(_no_rows(), "", 0, pairs=pairs)]
    sampled = [_sampled(_no_rows(), "", 0)]
    for number, (name, group) in enumerate(groups):
        table = group.read(*_READ)
        found = _measured(table, name, number, pairs=pairs)
        documents, size = totals[name]
        totals[name] = (documents + len(found), size + (pc.sum(found["text_bytes"]).as_py() or 0))
        measured.append(_held(found, MAX_ROWS / datasets / rows, demands))
        sampled.append(_sampled(table, name, demands.sample_documents / rows))
    # Arrow-backed columns: the ids are not copied into Python objects.
    frame = pa.concat_tables(measured).to_pandas(types_mapper=pd.ArrowDtype)
    if pairs:
        _compare_singles(frame)
    sample = pa.concat_tables(sampled).to_pandas()
    return Documents(frame, sample, totals, [group for _, group in groups])


def split_members(datasets: Sequence[Documents]) -> tuple["pd.DataFrame", list[RowGroup]]:
    """Return one row a document and split, over all datasets, and the row groups of all of them.

    Columns split and doc_id, and group among those groups. A document of several datasets is one
    row, but two where one dataset holds it out and another does not.
    """
    import pandas as pd

    frames: list[pd.DataFrame] = []
    groups: list[RowGroup] = []
    for each in datasets:
        frame = each.frame[["split", "doc_id", "group"]].dropna(subset="doc_id")
        frames.append(frame.assign(group=frame["group"] + len(groups)))
        groups += each.groups
    joined = pd.concat(frames).drop_duplicates(["split", "doc_id"], ignore_index=True)
    return joined, groups


def length_frame(preprocess: Path, dataset: DatasetRef) -> "pd.DataFrame":
    """Return one row a document of the shards, of either split: column tokens.

    Of more than `MAX_ROWS`, each second, third and so on.
    """
    import pandas as pd

    step = 1 + (dataset.train.documents + dataset.validation.documents) // MAX_ROWS
    lengths = [found[::step] for found in document_lengths(preprocess, dataset)]
    return pd.DataFrame({"tokens": np.concatenate(lengths)})


def shard_frame(preprocess: Path, dataset: DatasetRef) -> "pd.DataFrame":
    """Return one row a token shard: columns split, and as its record says path, md5, index_md5,
    mask_md5 and tokens. Of a dataset version whose tokens are streamed from its remote, md5 is
    null.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for name in SPLITS:
        for shard in _split(dataset, name).shards:
            path = preprocess / shard.path
            recorded = shard.model_dump(include={"md5", "index_md5", "mask_md5", "tokens"})
            rows.append({"split": name, "path": str(path), **recorded})
            if dataset.remote and not path.exists():
                rows[-1]["md5"] = None
    columns = ["split", "path", "md5", "index_md5", "mask_md5", "tokens"]
    return pd.DataFrame(rows, columns=columns)


def split_frame(
    preprocess: Path,
    dataset: DatasetRef,
    stats: dict[str, Any],
    found: Documents,
) -> "pd.DataFrame":
    """Return one row a split: what its record and the statistics state beside what the files hold.

    Columns: split, recorded_documents, recorded_bytes, recorded_tokens; stated_documents,
    stated_bytes, stated_tokens of the statistics, null where they lack the split; documents and
    bytes of text as in the Parquet files; indexed_documents and tokens as in the shards' indexes,
    null where one cannot be read.
    """
    import pandas as pd

    rows = []
    for name in SPLITS:
        split = _split(dataset, name)
        stated = stats.get("splits", {}).get(name, {})
        documents, size = found.splits[name]
        indexed, tokens = _indexed(preprocess, split)
        rows.append(
            {
                "split": name,
                "recorded_documents": split.documents,
                "recorded_bytes": split.bytes,
                "recorded_tokens": split.tokens,
                "stated_documents": stated.get("documents"),
                "stated_bytes": stated.get("bytes"),
                "stated_tokens": stated.get("tokens"),
                "documents": documents,
                "bytes": size,
                "indexed_documents": indexed,
                "tokens": tokens,
            }
        )
    return pd.DataFrame(rows)


def _split(dataset: DatasetRef, name: str) -> Split:
    split: Split = getattr(dataset, name)
    return split


def _indexed(preprocess: Path, split: Split) -> tuple[int | None, int | None]:
    documents = tokens = 0
    for shard in split.shards:
        try:
            index = ShardIndex(idx_path(shard_prefix(preprocess / shard.path)))
            offsets = index.document_offsets()
        except (OSError, ValueError):  # which of them and why, the shards' own check says
            return None, None
        documents += len(offsets) - 1
        tokens += int(offsets[-1])
    return documents, tokens


def _no_rows() -> "pa.Table":
    return SCHEMA.empty_table().select(_READ)


def _measured(table: "pa.Table", split: str, group: int, *, pairs: bool) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.compute as pc

    ids, texts = (table[name].to_pylist() for name in ("doc_id", "text"))
    mistaken = [
        None if text is None or _sha256(text) == doc_id else doc_id
        for doc_id, text in zip(ids, texts, strict=True)
    ]
    return pa.table(
        {
            "split": pa.repeat(split, len(table)),
            "doc_id": table["doc_id"],
            "bytes": table["bytes"],
            "characters": pc.utf8_length(table["text"]),
            "text_bytes": pc.binary_length(table["text"]),
            "mistaken_id": pa.array(mistaken, pa.string()),
            "group": pa.repeat(group, len(table)),
            **(_pair_columns(table) if pairs else {}),
        }
    )


def _pair_columns(table: "pa.Table") -> "dict[str, pa.Array]":
    import pyarrow as pa

    columns = (map(load_messages, table[name].to_pylist()) for name in ("messages", "rejected"))
    pairs = list(zip(*columns, strict=True))
    sizes = [_answer_characters(*pair) for pair in pairs]
    longer = [None if a is None or b is None else float(a > b) for a, b in sizes]
    return {
        "pair_fault": pa.array([pair_fault(*pair) for pair in pairs], pa.string()),
        "single": pa.array([single_answer(*pair) for pair in pairs], pa.string()),
        "chosen_characters": pa.array([size for size, _ in sizes], pa.int64()),
        "rejected_characters": pa.array([size for _, size in sizes], pa.int64()),
        "chosen_longer": pa.array(longer, pa.float64()),
    }


def _compare_singles(frame: "pd.DataFrame") -> None:
    """Say of each single chosen answer than which share of the single rejected ones it is longer.

    Their mean is the probability that a chosen answer is longer than a rejected one.
    """
    of_label = {label: rows.index for label, rows in frame.groupby("single")}
    if len(of_label) == 2:
        good, bad = of_label["chosen"], of_label["rejected"]
        lengths = np.sort(frame.loc[bad, "rejected_characters"].to_numpy(np.int64))
        found = frame.loc[good, "chosen_characters"].to_numpy(np.int64)
        frame.loc[good, "chosen_longer"] = np.searchsorted(lengths, found) / len(lengths)


def _answer_characters(chosen: Messages, rejected: Messages) -> tuple[int | None, int | None]:
    shared = shared_turns(chosen, rejected)
    ends = (chosen[shared:], rejected[shared:])
    one, other = (sum(len(said.strip()) for role, said in end if role == ASSISTANT) for end in ends)
    single = single_answer(chosen, rejected)
    return None if single == "rejected" else one, None if single == "chosen" else other


def _held(table: "pa.Table", fraction: float, demands: Validation) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.compute as pc

    if fraction >= 1:
        return table
    size = table["characters"]
    good = pc.is_null(table["mistaken_id"])
    if "pair_fault" in table.column_names:
        fits = pc.or_(pc.is_null(table["pair_fault"]), pc.is_valid(table["single"]))
        good = pc.and_(good, fits)
    for holds in (
        pc.equal(table["bytes"], table["text_bytes"]),
        pc.greater_equal(size, demands.min_characters),
        pc.less_equal(size, demands.max_characters),
    ):
        good = pc.and_(good, pc.fill_null(holds, False))
    ids = table["doc_id"].to_pylist()
    chosen = [doc_id is None or uniform(doc_id, part=2) < fraction for doc_id in ids]
    return table.filter(pc.or_(pc.invert(good), pa.chunked_array([pa.array(chosen, pa.bool_())])))


def _sampled(table: "pa.Table", split: str, fraction: float) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.compute as pc

    table = table.filter(pc.is_valid(table["text"]))
    texts = pc.utf8_slice_codeunits(table["text"], 0, SAMPLE_CHARACTERS)
    table = table.set_column(table.column_names.index("text"), "text", texts)
    if fraction < 1:
        table = table.filter(content_draws(texts.to_pylist()) < fraction)
    # Dataset versions from before there were pairs have no rejected conversations.
    others = table["rejected"] if "rejected" in table.column_names else pa.nulls(len(table))
    pairs = zip(table["messages"].to_pylist(), others.to_pylist(), strict=True)
    shown = [_said(*pair) for pair in pairs]
    return pa.table(
        {
            "split": pa.repeat(split, len(table)),
            "doc_id": table["doc_id"],
            "source": table["source"],
            "text": table["text"],
            "messages": pa.array([chosen for chosen, _ in shown], pa.string()),
            "rejected": pa.array([rejected for _, rejected in shown], pa.string()),
        }
    )


def _said(chosen: str | None, rejected: str | None) -> tuple[str | None, str | None]:
    """Return the two conversations, or of a single answer the one that has it."""
    if chosen and rejected and single_answer(load_messages(chosen), load_messages(rejected)):
        return max(chosen, rejected, key=len), None
    return chosen, rejected


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
