"""preprocess: from text to deduplicated documents, a tokenizer and token shards.

    source ─▶ extract ─▶ match ─▶ select ─▶ tokenizer ─▶ tokenize ─▶ assemble ─▶ shards
              a block    a range  a part    (here, from  a block     a shard
              of input   of keys  of files  a sample)    of texts

Each pass maps a task over items. Tasks run wherever `map_ordered` puts them, and pass their data on
in files below `work/`, so a corpus may be larger than any memory; this process only sees counts.
The work is divided by the corpus alone, so the outputs are the same bytes for any number of
workers, and a run that was killed continues after the finished tasks.
"""

import hashlib
import json
import logging
import shutil
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from pipelines.core.errors import UserError
from pipelines.core.storage import folder_hash, read_json
from pipelines.data.blocks import Block, extract
from pipelines.data.cleaning.cleaner import EvaluationSets, gather_ngrams
from pipelines.data.cleaning.decontaminate import set_names
from pipelines.data.duplicates.deduplication import join, match, partitions_for
from pipelines.data.output import Made, describe_dataset, publish, write_statistics
from pipelines.data.passes import (
    MapOrdered,
    Passes,
    block_bytes,
    map_in_process,
    mebibytes,
    work_folder,
)
from pipelines.data.reading.source_fingerprint import fingerprint_inputs
from pipelines.data.reading.sources import describe, list_inputs
from pipelines.data.reading.text_readers import plan_reads
from pipelines.data.selection import Selected, misplaced, part_files, plan_parts, select
from pipelines.data.tally import Tally
from pipelines.data.tokens.assembly import assemble, plan_shards
from pipelines.data.tokens.tokenization import (
    SIZES_FILE,
    make_tokenizer,
    plan_text_blocks,
    tokenize,
    tokenize_conversations,
)
from pipelines.data.tokens.tokenizer import Encoder
from pipelines.datasets.fetching import fetch_dataset
from pipelines.recipe.data_section import Data
from pipelines.recipe.recipe import Recipe
from pipelines.run.progress import ProgressWriter
from pipelines.run.records import SPLITS, TRAIN, VALIDATION, PreprocessRecord, Shard, output_folder
from pipelines.stage_cache.fingerprint import CODE_FILE

STAGE = PreprocessRecord.stage
WORK = "work"  # in a workspace, while preprocess runs

_log = logging.getLogger(__name__)

Blocks = dict[Path, Tally]  # folders of the documents that were read, in source order
Parts = dict[Path, Selected]  # folders with a file of each split, in source order


def run(
    recipe: Recipe, workspace: Path, map_ordered: MapOrdered = map_in_process
) -> PreprocessRecord:
    """Make the dataset that `recipe.data` describes in `outputs/preprocess`.

    Raises:
        UserError: The source has no usable documents or too few, or too many are malformed.
    """
    if recipe.data.source.is_published:
        return fetch_dataset(recipe, workspace)
    data, workspace = recipe.data, workspace.absolute()
    output = output_folder(workspace, STAGE)
    shutil.rmtree(output, ignore_errors=True)  # outputs of an earlier try must not mix with these
    with work_folder(workspace / WORK, _key(data, workspace)) as work:
        passes = Passes(work, map_ordered, partial(ProgressWriter, workspace, STAGE))
        evaluation_sets = _gather(data, passes)
        blocks = _extract(data, evaluation_sets, passes)
        tally = Tally.of(blocks.values())
        tally.check(describe(data.source), data.source.max_malformed_fraction)
        duplicates = _match(data, blocks, passes)
        parts = _select(data, blocks, duplicates, passes)
        for selected in parts.values():
            tally.drop_kept(selected.dropped, selected.dropped_bytes)
        tally.check(describe(data.source), data.source.max_malformed_fraction)
        texts = {split: part_files(parts, split) for split in SPLITS}
        tokenizer = work / "tokenizer"
        make_tokenizer(data, tokenizer, texts[TRAIN], texts[VALIDATION], passes)
        token_blocks = _tokenize(data, tokenizer, texts, passes)
        left_out = _left_out(data, parts, token_blocks)
        encoder = Encoder(tokenizer)
        shards = _assemble(data, token_blocks, encoder, passes)
        _refuse_changed_inputs(data, workspace)
        made = Made(tally, evaluation_sets, parts, tokenizer, token_blocks, shards, left_out)
        publish(made, output)
        dataset = describe_dataset(made, data, encoder.vocab_size)
        stats = write_statistics(made, data, dataset, output)
        return PreprocessRecord(dataset=dataset, stats=stats).write(workspace)


def _key(data: Data, workspace: Path) -> str | None:
    """Return the hash of all that decides the passes' results, or None if a part is unknown."""
    source, code = workspace / "source.json", workspace / CODE_FILE
    if not (source.is_file() and code.is_file()):
        return None
    facts = [data.model_dump(mode="json"), read_json(source), read_json(code)[STAGE]]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _gather(data: Data, passes: Passes) -> EvaluationSets:
    """Gather the evaluation sets' n-grams, which no document may hold, before all passes."""
    paths = data.decontamination.against
    made = passes.run(
        "evaluation-sets", partial(gather_ngrams, data=data), paths, int, "evaluation sets read"
    )
    return tuple((name, folder) for name, (folder, _) in zip(set_names(paths), made, strict=True))


def _extract(data: Data, evaluation_sets: EvaluationSets, passes: Passes) -> Blocks:
    """Read, normalise and clean every block of the source, up to `max_documents` (pass 1)."""
    source, limit = data.source, data.source.max_documents
    inputs = list_inputs(source)
    plan = plan_reads(source, inputs, block_bytes(sum(found.bytes for found in inputs)))
    blocks: Blocks = {}
    kept = 0
    clean = partial(extract, data=data, evaluation_sets=evaluation_sets)
    task = partial(clean, limit=limit)
    for block, (folder, tally) in zip(
        plan, passes.run("extract", task, plan, Tally, "MiB read", _mebibytes), strict=False
    ):
        if limit is not None and kept + tally.kept > limit:  # read this block again, up to `limit`
            task = partial(clean, limit=limit - kept)
            ((folder, tally),) = passes.run(
                "extract-last", task, [block], Tally, "MiB read", _mebibytes
            )
        blocks[folder] = tally
        kept += tally.kept
        if kept == limit:
            break
    return blocks


def _mebibytes(block: Block) -> float:
    return sum(map(mebibytes, block))


def _match(data: Data, blocks: Blocks, passes: Passes) -> Path:
    """Find documents that repeat an earlier one; return the folder that names them (pass 2)."""
    partitions = partitions_for(sum(tally.kept for tally in blocks.values()), data.dedup)
    task = partial(match, partitions=partitions, blocks=list(blocks), dedup=data.dedup)
    edges = passes.run("match", task, range(partitions), str, "partitions matched")
    edge_files = [folder / name for folder, name in edges]
    ((folder, _),) = passes.run("join", join, [edge_files], int, "partitions joined", len)
    return folder


def _select(data: Data, blocks: Blocks, duplicates: Path, passes: Passes) -> Parts:
    """Drop duplicates and split by content (pass 3); if two documents remain, no split is empty."""
    plan = plan_parts(list(blocks), list(blocks.values()))
    task = partial(select, duplicates=duplicates, validation_fraction=data.validation_fraction)
    parts = dict(passes.run("select", task, plan, Selected, "MiB selected", mebibytes))
    moved = misplaced(parts.values())
    if moved:
        task = partial(task, moved=moved)
        parts = dict(passes.run("select-moved", task, plan, Selected, "MiB selected", mebibytes))
    return parts


def _tokenize(
    data: Data, tokenizer: Path, texts: dict[str, list[Path]], passes: Passes
) -> dict[str, dict[Path, int]]:
    """Write the token ids of every document of both splits (pass 4)."""
    plan = {split: plan_text_blocks(texts[split]) for split in SPLITS}
    task = partial(tokenize, tokenizer=tokenizer, tokenizer_hash=folder_hash(tokenizer))
    if data.instruction.is_chat:
        capacity = data.sequence_length + 1
        task = partial(tokenize_conversations, **task.keywords, capacity=capacity)
    blocks = [block for split in SPLITS for block in plan[split]]
    made = passes.run("tokenize", task, blocks, int, "MiB tokenized", mebibytes)
    return {split: dict(islice(made, len(plan[split]))) for split in SPLITS}


def _left_out(data: Data, parts: Parts, token_blocks: dict[str, dict[Path, int]]) -> int:
    """Return how many pairs no sample holds, and tell of them.

    Raises:
        UserError: a split has no others.
    """
    if not data.instruction.is_preference:
        return 0
    found = sum((part.documents for part in parts.values()), Counter[str]())
    kept = {
        split: sum(len(np.load(block / SIZES_FILE)) // 2 for block in token_blocks[split])
        for split in SPLITS
    }
    left_out: int = found.total() - sum(kept.values())
    line = (
        f"{left_out} of {found.total()} pairs are left out, as both conversations together have "
        f"more than data.sequence_length + 1 = {data.sequence_length + 1} tokens; raise "
        "data.sequence_length to keep them"
    )
    if empty := [split for split in SPLITS if not kept[split]]:
        raise UserError(f"no pair is left for {' and '.join(empty)}: {line}")
    if left_out:
        _log.warning(line)
    return left_out


def _assemble(
    data: Data, token_blocks: dict[str, dict[Path, int]], encoder: Encoder, passes: Passes
) -> dict[str, dict[Path, Shard]]:
    """Write the shards of both splits (pass 5)."""
    pairs = data.instruction.is_preference
    plan = {
        split: plan_shards(split, list(token_blocks[split]), data.shard_tokens, pairs=pairs)
        for split in SPLITS
    }
    capacity = data.sequence_length + 1 if data.packing == "best_fit" else None
    task = partial(
        assemble,
        vocab_size=encoder.vocab_size,
        end_id=encoder.end_id,
        capacity=capacity,
        pairs=pairs,
    )
    shards = [shard for split in SPLITS for shard in plan[split]]
    made = passes.run("assemble", task, shards, Shard, "shards written")
    return {split: dict(islice(made, len(plan[split]))) for split in SPLITS}


def _refuse_changed_inputs(data: Data, workspace: Path) -> None:
    """Check that the input is still what `source.json` says: the outputs are cached by its hash."""
    path = workspace / "source.json"
    if path.is_file() and read_json(path) != fingerprint_inputs(data):
        raise UserError(
            f"{describe(data.source)} changed since this run began; start a new run to read its "
            "present content"
        )
