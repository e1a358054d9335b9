"""preprocess: text in; deduplicated documents, a tokenizer and token shards out.

    source ─▶ extract ─▶ match ─▶ select ─▶ tokenizer ─▶ tokenize ─▶ assemble ─▶ shards
              a block    a range  a part    (here, from  a block     a shard
              of input   of keys  of files  a sample)    of texts

Each pass maps a task over items; tasks run wherever `map_ordered` puts them and hand their data on
in files below `work/`, so a corpus may be larger than any memory. This process only sees counts.
How the work is cut depends on the corpus alone, so the outputs are the same bytes however many
workers there are, and a run that was killed goes on from the tasks that were finished.
"""

import hashlib
import json
import logging
import shutil
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError
from pipelines.core.progress import ProgressWriter
from pipelines.core.recipe import Recipe
from pipelines.core.recipe_data import Data
from pipelines.core.records import DatasetRef, PreprocessRecord, Shard, Split, output_folder
from pipelines.core.storage import folder_hash, fresh_folder, md5, read_json, write_json, write_text
from pipelines.data.assembly import TOKENS, assemble, plan_shards
from pipelines.data.blocks import Block, extract
from pipelines.data.chat_encoder import make_chat_tokenizer
from pipelines.data.dedup import join, match
from pipelines.data.documents import documents_folder, row_groups, split_file
from pipelines.data.fingerprint import fingerprint_inputs
from pipelines.data.mapping import MapOrdered, map_in_process
from pipelines.data.near_duplicates import partitions_for
from pipelines.data.passes import RESULT, Passes, block_bytes, work_folder
from pipelines.data.readers import plan_reads
from pipelines.data.selection import Part, Selected, plan_parts, select
from pipelines.data.sources import describe, list_inputs
from pipelines.data.splitting import SPLITS, TRAIN, VALIDATION
from pipelines.data.tally import REJECTS, STATS, Tally
from pipelines.data.tokenization import (
    TextBlock,
    characters,
    first_loss,
    plan_text_blocks,
    sample_texts,
    tokenize,
    tokenize_conversations,
)
from pipelines.data.tokenizer import (
    Encoder,
    byte_tokenizer,
    character_tokenizer,
    copy_pretrained,
    save_tokenizer,
    train_bpe,
)
from pipelines.ledger.dataset_stage import fetch_dataset

STAGE = PreprocessRecord.stage
WORK = "work"  # in a workspace, while preprocess runs
# BPE merges hardly change beyond this much text, and training takes some 3 s on two cores.
BPE_SAMPLE_BYTES = 8_000_000
CHECKED_ROW_GROUPS = 2  # of each split, at least, where a pretrained tokenizer is tried
MIB = 1 << 20

_log = logging.getLogger(__name__)

Blocks = dict[Path, Tally]  # folders of documents read, in source order
Parts = dict[Path, Selected]  # folders with a file of each split, in source order
TokenBlocks = dict[Path, int]  # folders of token ids, in order, and how many there are
Shards = dict[Path, Shard]  # folders of token shards, in order


def run(
    recipe: Recipe, workspace: Path, map_ordered: MapOrdered = map_in_process
) -> PreprocessRecord:
    """Make the dataset that `recipe.data` describes in `outputs/preprocess`.

    Raises:
        UserError: nothing usable lies at the source, or too little, or too much of it is malformed.
    """
    if recipe.data.source.kind == "dataset":
        return fetch_dataset(recipe, workspace)
    data, workspace = recipe.data, workspace.absolute()
    output = output_folder(workspace, STAGE)
    shutil.rmtree(output, ignore_errors=True)  # nothing of an earlier try looks like this one's
    with work_folder(workspace / WORK, _key(data, workspace)) as work:
        passes = Passes(work, map_ordered, partial(ProgressWriter, workspace, STAGE))
        blocks = _extract(data, passes)
        duplicates = _match(data, blocks, passes)
        parts, tally = _select(data, blocks, duplicates, passes)
        encoder = _make_tokenizer(data, work / "tokenizer", parts, passes, map_ordered)
        token_blocks = _tokenize(data, work / "tokenizer", parts, passes)
        shards = _assemble(data, token_blocks, encoder, passes)
        _refuse_changed_inputs(data, workspace)
        _publish(output, parts, work / "tokenizer", shards)
    dataset = DatasetRef(
        vocab_size=encoder.vocab_size,
        packed_length=data.sequence_length if data.packing == "best_fit" else None,
        **{split: _split(split, parts, shards[split]) for split in SPLITS},
    )
    stats = tally.to_dict() | _token_stats(data, dataset)
    write_json(output / STATS, stats)
    _write_rejects(output / REJECTS, tally)
    return PreprocessRecord(dataset=dataset, stats=stats).write(workspace)


def _key(data: Data, workspace: Path) -> str | None:
    """What decides the passes' results; None where it is not known, as nothing names the input."""
    source = workspace / "source.json"
    if not source.is_file():
        return None
    package = Path(__file__).parent.parent
    code = [Path(__file__), *sorted((package / "data").glob("*.py"))]
    facts = [data.model_dump(mode="json"), read_json(source), [md5(path) for path in code]]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _extract(data: Data, passes: Passes) -> Blocks:
    """Pass 1: read, normalise and clean every block of the source, up to `max_documents`."""
    source, limit = data.source, data.source.max_documents
    inputs = list_inputs(source)
    plan = plan_reads(source, inputs, block_bytes(sum(found.bytes for found in inputs)))

    def mebibytes(block: Block) -> float:
        return sum(read.bytes for read in block) / MIB

    blocks: Blocks = {}
    kept = 0
    task = partial(extract, data=data, limit=limit)
    for block, (folder, tally) in zip(
        plan, passes.run("extract", task, plan, Tally, "MiB read", mebibytes), strict=False
    ):
        if limit is not None and kept + tally.kept > limit:  # the block that goes beyond, again
            task = partial(extract, data=data, limit=limit - kept)
            ((folder, tally),) = passes.run(
                "extract-last", task, [block], Tally, "MiB read", mebibytes
            )
        blocks[folder] = tally
        kept += tally.kept
        if kept == limit:
            break
    return blocks


def _match(data: Data, blocks: Blocks, passes: Passes) -> Path:
    """Pass 2: find the documents that repeat an earlier one; the folder that names them."""
    partitions = partitions_for(sum(tally.kept for tally in blocks.values()), data.dedup)
    task = partial(match, partitions=partitions, blocks=list(blocks), dedup=data.dedup)
    edges = passes.run("match", task, range(partitions), str, "partitions matched")
    edge_files = [folder / name for folder, name in edges]
    ((folder, _),) = passes.run("join", join, [edge_files], int, "partitions joined", len)
    return folder


def _select(data: Data, blocks: Blocks, duplicates: Path, passes: Passes) -> tuple[Parts, Tally]:
    """Pass 3: drop duplicates, split by content; neither split stays empty."""
    tally = Tally()
    for block in blocks.values():
        tally.add(block)
    tally.check(describe(data.source), data.source.max_malformed_fraction)
    plan = plan_parts(list(blocks), list(blocks.values()))
    task = partial(select, duplicates=duplicates, validation_fraction=data.validation_fraction)
    parts = dict(passes.run("select", task, plan, Selected, "MiB selected", _mebibytes))
    for selected in parts.values():
        for reason, count in selected.dropped.items():
            tally.drop_kept(reason, count, selected.dropped_bytes[reason])
    tally.check(describe(data.source), data.source.max_malformed_fraction)
    empty = [name for name in SPLITS if not sum(part.documents[name] for part in parts.values())]
    if empty:
        # Only a handful of documents can all fall into one split.
        doc_id = (
            min(part.smallest for part in parts.values())
            if empty == [VALIDATION]
            else max(part.largest for part in parts.values())
        )
        task = partial(task, moved=doc_id)
        parts = dict(passes.run("select-moved", task, plan, Selected, "MiB selected", _mebibytes))
    return parts, tally


def _make_tokenizer(
    data: Data, folder: Path, parts: Parts, passes: Passes, map_ordered: MapOrdered
) -> Encoder:
    recipe = data.tokenizer
    # A held-out document must not shape what it is measured with.
    training = plan_text_blocks(_files(parts, TRAIN))
    with fresh_folder(folder) as target:
        if recipe.kind == "pretrained":
            copy_pretrained(str(recipe.path), target)
        elif recipe.kind == "bpe":
            fraction = BPE_SAMPLE_BYTES / sum(part.bytes[TRAIN] for part in parts.values())
            task = partial(sample_texts, fraction=fraction)
            found = passes.run("sample", task, training, list[str], "MiB sampled", _mebibytes)
            texts = (text for _, sample in found for text in sample)
            save_tokenizer(train_bpe(texts, recipe.vocab_size), target)
        elif recipe.kind == "byte":
            save_tokenizer(byte_tokenizer(), target)
        else:
            alphabets = passes.run(
                "characters", characters, training, str, "MiB sampled", _mebibytes
            )
            save_tokenizer(character_tokenizer("".join(found for _, found in alphabets)), target)
        if data.instruction.kind != "none":
            make_chat_tokenizer(target, data.instruction)
    if recipe.kind == "pretrained":
        _check_round_trip(str(recipe.path), folder, parts, map_ordered)
    return Encoder(folder)


def _check_round_trip(name: str, tokenizer: Path, parts: Parts, map_ordered: MapOrdered) -> None:
    """Refuse a tokenizer that changes text: bits per byte would be had for less text."""
    groups = []
    for split in SPLITS:
        found = row_groups(_files(parts, split))
        groups += found[:: max(1, len(found) // CHECKED_ROW_GROUPS)]
    function = partial(first_loss, tokenizer=tokenizer, tokenizer_hash=folder_hash(tokenizer))
    for loss in map_ordered(function, groups):
        if loss is not None:
            raise UserError(
                f"{name}: this tokenizer does not give text back: {loss}; what it loses would "
                "count as predicted; give a lossless one, such as a byte-level BPE, in "
                "data.tokenizer.path, or set data.tokenizer.kind to bpe"
            )


def _tokenize(data: Data, tokenizer: Path, parts: Parts, passes: Passes) -> dict[str, TokenBlocks]:
    """Pass 4: the token ids of every document of both splits."""
    plan = {split: plan_text_blocks(_files(parts, split)) for split in SPLITS}
    encode = tokenize if data.instruction.kind == "none" else tokenize_conversations
    task = partial(encode, tokenizer=tokenizer, tokenizer_hash=folder_hash(tokenizer))
    blocks = [block for split in SPLITS for block in plan[split]]
    made = passes.run("tokenize", task, blocks, int, "MiB tokenized", _mebibytes)
    return {split: dict(islice(made, len(plan[split]))) for split in SPLITS}


def _assemble(
    data: Data, token_blocks: dict[str, TokenBlocks], encoder: Encoder, passes: Passes
) -> dict[str, Shards]:
    """Pass 5: the shards of both splits."""
    plan = {
        split: plan_shards(split, list(token_blocks[split]), data.shard_tokens) for split in SPLITS
    }
    capacity = data.sequence_length + 1 if data.packing == "best_fit" else None
    task = partial(
        assemble, vocab_size=encoder.vocab_size, end_id=encoder.end_id, capacity=capacity
    )
    shards = [shard for split in SPLITS for shard in plan[split]]
    made = passes.run("assemble", task, shards, Shard, "shards written")
    return {split: dict(islice(made, len(plan[split]))) for split in SPLITS}


def _refuse_changed_inputs(data: Data, workspace: Path) -> None:
    """What was read must be what `source.json` says, as the outputs are cached under its hash."""
    path = workspace / "source.json"
    if path.is_file() and read_json(path) != fingerprint_inputs(data):
        raise UserError(
            f"{describe(data.source)} changed since this run began; start a new run, which reads "
            "it as it is now"
        )


def _publish(output: Path, parts: Parts, tokenizer: Path, shards: dict[str, Shards]) -> None:
    """Give the passes' files their places in the output; hard links, as they are large."""
    documents_folder(output).mkdir(parents=True)
    (output / TOKENS).mkdir()
    for number, part in enumerate(parts):
        for split in SPLITS:
            source = part / f"{split}.parquet"
            split_file(documents_folder(output), split, number).hardlink_to(source)
    for split in SPLITS:
        for folder in shards[split]:
            for path in folder.iterdir():
                if path.name != RESULT:
                    (output / TOKENS / path.name).hardlink_to(path)
    shutil.copytree(tokenizer, output / "tokenizer")


def _mebibytes(work: Part | TextBlock) -> float:
    return work.bytes / MIB


def _split(split: str, parts: Parts, shards: Shards) -> Split:
    return Split(
        documents=sum(part.documents[split] for part in parts.values()),
        bytes=sum(part.bytes[split] for part in parts.values()),
        tokens=sum(shard.tokens for shard in shards.values()),
        shards=tuple(shards.values()),
    )


def _files(parts: Parts, split: str) -> list[Path]:
    return [folder / f"{split}.parquet" for folder in parts]


def _token_stats(data: Data, dataset: DatasetRef) -> dict[str, Any]:
    splits = {name: getattr(dataset, name) for name in SPLITS}
    tokens = sum(split.tokens for split in splits.values())
    size = sum(split.bytes for split in splits.values())
    return {
        "tokens": tokens,
        "bytes_per_token": round(size / tokens, 4),
        "tokenizer": {"kind": data.tokenizer.kind, "vocab_size": dataset.vocab_size},
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


def _write_rejects(path: Path, tally: Tally) -> None:
    lines = (
        json.dumps({"reason": reason, **reject._asdict()}, ensure_ascii=False) + "\n"
        for reason, rejects in sorted(tally.rejects.items())
        for reject in rejects
    )
    write_text(path, "".join(lines))
