"""preprocess: text in; deduplicated documents, a tokenizer and token shards out.

    read, normalise ─▶ drop duplicates ─▶ split by content ─▶ tokenizer ─▶ tokenise ─▶ shards
      (tasks)              (here, in source order)             (here)      (tasks)     (here)

Tasks run wherever `map_ordered` puts them; this process keeps the order, so the outputs are the
same bytes however many workers there are. No more than a few MiB of text are held at once.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError
from pipelines.core.progress import ProgressWriter
from pipelines.core.recipe import Recipe
from pipelines.core.recipe_data import Data
from pipelines.core.records import DatasetRef, PreprocessRecord, Shard, Split, output_folder
from pipelines.core.storage import md5, read_json, write_json
from pipelines.data.dedup import SeenDocuments
from pipelines.data.documents import (
    DocumentWriter,
    documents_folder,
    documents_path,
    move_one,
    row_groups,
    sizes,
)
from pipelines.data.fingerprint import fingerprint_inputs
from pipelines.data.mapping import MapOrdered, map_in_process
from pipelines.data.normalize import DUPLICATE, Document
from pipelines.data.readers import plan_reads, read_batch
from pipelines.data.sources import describe, list_inputs
from pipelines.data.splitting import SPLITS, TRAIN, VALIDATION, split_of
from pipelines.data.tally import STATS, Tally
from pipelines.data.token_shards import RollingShardWriter, bin_path, idx_path
from pipelines.data.tokenization import characters, first_loss, sample_texts, tokenize
from pipelines.data.tokenizer import (
    TOKENIZER_FILE,
    Encoder,
    byte_tokenizer,
    character_tokenizer,
    copy_pretrained,
    save_tokenizer,
    train_bpe,
)

STAGE = PreprocessRecord.stage
# BPE merges hardly change beyond this much text, and training takes some 3 s on two cores.
BPE_SAMPLE_BYTES = 8_000_000
CHECKED_ROW_GROUPS = 2  # of each split, at least, where a pretrained tokenizer is tried


def run(
    recipe: Recipe, workspace: Path, map_ordered: MapOrdered = map_in_process
) -> PreprocessRecord:
    """Make the dataset that `recipe.data` describes in `outputs/preprocess`.

    Raises:
        UserError: nothing usable lies at the source, or too little, or too much of it is malformed.
    """
    folder = _cleared(output_folder(workspace.absolute(), STAGE))
    tally = _collect_documents(recipe.data, folder, workspace, map_ordered)
    _make_tokenizer(recipe.data, folder, map_ordered)
    _refuse_changed_inputs(recipe.data, workspace)
    encoder = Encoder(folder / "tokenizer")
    splits = _write_shards(recipe.data, folder, workspace, encoder.vocab_size, map_ordered)
    stats = tally.to_dict() | _token_stats(recipe.data, splits, encoder.vocab_size)
    write_json(folder / STATS, stats)
    dataset = DatasetRef(vocab_size=encoder.vocab_size, **splits)
    return PreprocessRecord(dataset=dataset, stats=stats).write(workspace)


def _refuse_changed_inputs(data: Data, workspace: Path) -> None:
    """What was read must be what `source.json` says, as the outputs are cached under its hash."""
    path = workspace / "source.json"
    if path.is_file() and read_json(path) != fingerprint_inputs(data):
        raise UserError(
            f"{describe(data.source)} changed since this run began; start a new run, which reads "
            "it as it is now"
        )


def _cleared(folder: Path) -> Path:
    """An empty output folder: what an earlier attempt left would be taken for this one's."""
    shutil.rmtree(folder, ignore_errors=True)
    documents_folder(folder).mkdir(parents=True)
    (folder / "tokens").mkdir()
    return folder


def _collect_documents(data: Data, folder: Path, workspace: Path, map_ordered: MapOrdered) -> Tally:
    """Write each split's documents: normalised, no duplicates, in source order."""
    tally = Tally()
    paths = {split: documents_path(folder, split) for split in SPLITS}
    rows = dict.fromkeys(SPLITS, 0)
    with ExitStack() as stack:
        writers = {name: stack.enter_context(DocumentWriter(paths[name])) for name in SPLITS}
        for found in _kept(data, tally, workspace, map_ordered):
            split = split_of(found.doc_id, data.validation_fraction)
            writers[split].add(found)
            rows[split] += 1
    tally.check(describe(data.source), data.source.max_malformed_fraction)
    if not rows[VALIDATION]:
        move_one(paths[TRAIN], paths[VALIDATION], smallest=True)
    elif not rows[TRAIN]:
        move_one(paths[VALIDATION], paths[TRAIN], smallest=False)
    return tally


def _kept(data: Data, tally: Tally, workspace: Path, map_ordered: MapOrdered) -> Iterator[Document]:
    """The documents to keep, in source order; every document read is tallied."""
    source = data.source
    batches = plan_reads(source, list_inputs(source))
    total = sum(read.bytes for batch in batches for read in batch)
    progress = ProgressWriter(workspace, STAGE)
    seen = SeenDocuments()
    done = 0
    read = partial(read_batch, text_field=source.text_field)
    for batch, documents in zip(batches, map_ordered(read, batches), strict=False):
        for found in documents:
            reason = found.dropped or (None if seen.add(found.doc_id) else DUPLICATE)
            tally.add(found, reason)
            if reason is None:
                yield found
            if tally.kept == source.max_documents:
                return
        done += sum(part.bytes for part in batch)
        progress.write(done / 1024, total / 1024, "KiB read", force=batch is batches[-1])


def _make_tokenizer(data: Data, folder: Path, map_ordered: MapOrdered) -> None:
    recipe = data.tokenizer
    target = folder / "tokenizer"
    # A held-out document must not shape what it is measured with.
    training = documents_path(folder, TRAIN)
    if recipe.kind == "pretrained":
        copy_pretrained(str(recipe.path), target)
        _check_round_trip(str(recipe.path), folder, map_ordered)
    elif recipe.kind == "bpe":
        fraction = BPE_SAMPLE_BYTES / int(sizes(training).sum())
        sample = sample_texts(row_groups(training), fraction)
        save_tokenizer(train_bpe(sample, recipe.vocab_size), target)
    elif recipe.kind == "byte":
        save_tokenizer(byte_tokenizer(), target)
    else:
        found = chain.from_iterable(map_ordered(characters, row_groups(training)))
        save_tokenizer(character_tokenizer(found), target)


def _check_round_trip(name: str, folder: Path, map_ordered: MapOrdered) -> None:
    """Refuse a tokenizer that changes text: bits per byte would be had for less text."""
    tokenizer = folder / "tokenizer"
    groups = []
    for split in SPLITS:
        found = row_groups(documents_path(folder, split))
        groups += found[:: max(1, len(found) // CHECKED_ROW_GROUPS)]
    function = partial(
        first_loss, tokenizer=tokenizer, tokenizer_md5=md5(tokenizer / TOKENIZER_FILE)
    )
    for loss in map_ordered(function, groups):
        if loss is not None:
            raise UserError(
                f"{name}: this tokenizer does not give text back: {loss}; what it loses would "
                "count as predicted; give a lossless one, such as a byte-level BPE, in "
                "data.tokenizer.path, or set data.tokenizer.kind to bpe"
            )


def _write_shards(
    data: Data, folder: Path, workspace: Path, vocab_size: int, map_ordered: MapOrdered
) -> dict[str, Split]:
    """Tokenise both splits in one pass and write their shards, in document order."""
    writers = {
        split: RollingShardWriter(folder / "tokens", split, vocab_size, data.shard_tokens)
        for split in SPLITS
    }
    documents = {split: sizes(documents_path(folder, split)) for split in SPLITS}
    groups = [
        (split, group) for split in SPLITS for group in row_groups(documents_path(folder, split))
    ]
    total = sum(len(counts) for counts in documents.values())
    progress = ProgressWriter(workspace, STAGE)
    done = 0
    tokenizer = folder / "tokenizer"
    function = partial(tokenize, tokenizer=tokenizer, tokenizer_md5=md5(tokenizer / TOKENIZER_FILE))
    results = map_ordered(function, [group for _, group in groups])
    for (split, _), tokenized in zip(groups, results, strict=True):
        for ids in tokenized:
            writers[split].add(ids)
            done += 1
        progress.write(done, total, "documents tokenized", force=done == total)
    return {
        split: Split(
            documents=len(documents[split]),
            bytes=int(documents[split].sum()),
            tokens=sum(shard.tokens for shard in shards),
            shards=shards,
        )
        for split, writer in writers.items()
        for shards in [_shards(writer, folder)]
    }


def _shards(writer: RollingShardWriter, folder: Path) -> tuple[Shard, ...]:
    writer.close()
    return tuple(
        Shard(
            path=bin_path(prefix).relative_to(folder).as_posix(),
            md5=md5(bin_path(prefix)),
            index_md5=md5(idx_path(prefix)),
            bytes=bin_path(prefix).stat().st_size,
            tokens=tokens,
        )
        for prefix, tokens in writer.tokens.items()
    )


def _token_stats(data: Data, splits: dict[str, Split], vocab_size: int) -> dict[str, Any]:
    tokens = sum(split.tokens for split in splits.values())
    size = sum(split.bytes for split in splits.values())
    return {
        "tokens": tokens,
        "bytes_per_token": round(size / tokens, 4),
        "tokenizer": {"kind": data.tokenizer.kind, "vocab_size": vocab_size},
        "splits": {
            name: {
                "documents": split.documents,
                "bytes": split.bytes,
                "tokens": split.tokens,
                "bytes_per_token": round(split.bytes / split.tokens, 4),
                "shards": len(split.shards),
            }
            for name, split in splits.items()
        },
    }
