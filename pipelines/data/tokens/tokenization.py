"""Documents on disk to token ids: what the tokenizer is made from, and pass 4.

The tokenizer of a dataset: trained on the training documents, or someone else's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.core.errors import UserError
from pipelines.core.storage import folder_hash, fresh_folder
from pipelines.data.documents import RowGroup, load_messages, row_groups, sizes
from pipelines.data.normalize import shared_turns
from pipelines.data.passes import Passes, block_bytes, mebibytes
from pipelines.data.tokens.chat_encoder import ChatEncoder, EncodedChat, make_chat_tokenizer
from pipelines.data.tokens.chat_template import template_characters
from pipelines.data.tokens.tokenizer import (
    Encoder,
    byte_tokenizer,
    character_tokenizer,
    copy_pretrained,
    save_tokenizer,
    train_bpe,
    train_extension,
)
from pipelines.recipe.data_section import Data
from pipelines.run.records import uniform

IDS_FILE = "ids.bin"  # of a token block: the ids of its documents, one after the other
SIZES_FILE = "sizes.npy"  # int32 [documents], in tokens
MASK_FILE = "mask.bin"  # of conversations: a byte a token, 1 where it is to be predicted
_EXCERPT = 12  # characters shown before and after what a tokenizer changes


@dataclass(frozen=True)
class TextBlock:
    """Consecutive row groups of a documents file."""

    groups: tuple[RowGroup, ...]
    bytes: int  # of all columns, as Parquet counts them


def plan_text_blocks(paths: Sequence[Path]) -> list[TextBlock]:
    """Group the row groups of each file, in order, into blocks."""
    metadata = [pq.read_metadata(path) for path in paths]
    found = [
        [(RowGroup(path, i), meta.row_group(i).total_byte_size) for i in range(meta.num_row_groups)]
        for path, meta in zip(paths, metadata, strict=True)
    ]
    limit = block_bytes(sum(size for groups in found for _, size in groups))
    return [block for groups in found for block in _blocks(groups, limit)]


def _blocks(groups: Sequence[tuple[RowGroup, int]], limit: int) -> Iterator[TextBlock]:
    block: list[RowGroup] = []
    total = 0
    for group, size in groups:
        if block and total + size > limit:
            yield TextBlock(tuple(block), total)
            block, total = [], 0
        block.append(group)
        total += size
    if block:
        yield TextBlock(tuple(block), total)


def tokenize(block: TextBlock, folder: Path, *, tokenizer: Path, tokenizer_hash: str) -> int:
    """Pass 4: write the ids and sizes of a block's documents, each with its end-of-document id.

    Returns:
        How many tokens there are.
    """
    encoder = _encoder(tokenizer, tokenizer_hash)
    sizes: list[int] = []
    with (folder / IDS_FILE).open("wb") as file:
        for group in block.groups:
            for ids in encoder.encode(group.read("text").column(0).to_pylist()):
                file.write(ids.tobytes())
                sizes.append(len(ids))
    np.save(folder / SIZES_FILE, np.array(sizes, np.int32))
    return sum(sizes)


def tokenize_conversations(
    block: TextBlock, folder: Path, *, tokenizer: Path, tokenizer_hash: str, capacity: int
) -> int:
    """Pass 4 for conversations: the same, rendered by the chat template, and the loss mask.

    Of a pair the chosen and then the rejected conversation are written, one document each. A pair
    of more than `capacity` tokens, those of a sample, is left out: half of it teaches nothing.
    """
    encoder = _chat_encoder(tokenizer, tokenizer_hash)
    sizes: list[int] = []
    with (folder / IDS_FILE).open("wb") as ids, (folder / MASK_FILE).open("wb") as mask:
        for group in block.groups:
            for chat in encode_table(encoder, group.read("messages", "rejected"), capacity):
                ids.write(chat.ids.tobytes())
                mask.write(chat.mask.tobytes())
                sizes.append(len(chat.ids))
    np.save(folder / SIZES_FILE, np.array(sizes, np.int32))
    return sum(sizes)


def encode_table(encoder: ChatEncoder, table: pa.Table, capacity: int) -> Iterator[EncodedChat]:
    """Yield the conversations of the columns messages and rejected, as pass 4 writes them."""
    chosen, rejected = (list(map(load_messages, column.to_pylist())) for column in table.columns)
    given = list(map(shared_turns, chosen, rejected))
    preferred = encoder.encode(chosen, given)
    if not any(rejected):
        yield from preferred
        return
    for both in zip(preferred, encoder.encode(rejected, given), strict=True):
        # For an answer that is not there stand two tokens, from which nothing is learnt: targets
        # and their inputs have the number of a document, and the first of a sample is no target.
        pair = [c if c.mask.any() else EncodedChat(c.ids[-2:], c.mask[-2:], "") for c in both]
        if sum(len(chat.ids) for chat in pair) <= capacity:
            yield from pair


def first_loss(
    group: RowGroup,
    folder: Path,  # noqa: ARG001 (writes nothing)
    *,
    tokenizer: Path,
    tokenizer_hash: str,
) -> str:
    """Return how the first document of a row group comes back that the tokenizer does not give
    back.

    Empty where it gives back all.
    """
    encoder = _encoder(tokenizer, tokenizer_hash)
    for text in group.read("text").column(0).to_pylist():
        given, back = encoder.round_trip(text)
        if given != back:
            pairs = enumerate(zip(given, back, strict=False))
            shorter = min(len(given), len(back))
            same = next((index for index, (a, b) in pairs if a != b), shorter)
            start, stop = max(same - _EXCERPT, 0), same + _EXCERPT
            return f"{given[start:stop]!r} comes back as {back[start:stop]!r}"
    return ""


def characters(block: TextBlock, folder: Path) -> str:  # noqa: ARG001 (writes nothing)
    """Return the distinct characters of a block."""
    found: set[str] = set()
    for group in block.groups:
        found.update(*group.read("text").column(0).to_pylist())
    return "".join(sorted(found))


def sample_texts(block: TextBlock, folder: Path, *, fraction: float) -> list[str]:  # noqa: ARG001
    """About this fraction of the documents, chosen by content and so alike in every run.

    Texts are read only where a document is chosen. The block's first document always is: of a few
    very long ones, chance might take none.
    """
    texts = []
    for group in block.groups:
        ids = group.read("doc_id").column(0).to_pylist()
        chosen = [row for row, doc_id in enumerate(ids) if uniform(doc_id, part=1) < fraction]
        if not chosen and group is block.groups[0]:
            chosen = [0]
        if chosen:
            texts += group.read("text").column(0).take(chosen).to_pylist()
    return texts


@lru_cache(maxsize=1)
def _encoder(folder: Path, tokenizer_hash: str) -> Encoder:  # noqa: ARG001 (keys the cache)
    # A worker keeps the tokenizer between tasks; a large one takes half a second to load.
    return Encoder(folder)


@lru_cache(maxsize=1)
def _chat_encoder(folder: Path, tokenizer_hash: str) -> ChatEncoder:  # noqa: ARG001
    return ChatEncoder(folder)


# BPE merges hardly change beyond this much text, and training takes some 3 s on two cores.
BPE_SAMPLE_BYTES = 8_000_000
# Each gives a document at least, which would be far too many of a corpus of terabytes.
_SAMPLED_BLOCKS = 1024
CHECKED_ROW_GROUPS = 2  # of each split, at least, where a pretrained tokenizer is tried


def make_tokenizer(
    data: Data, folder: Path, training: Sequence[Path], held_out: Sequence[Path], passes: Passes
) -> None:
    """Fill a folder with the tokenizer that a recipe names.

    Args:
        data: of the recipe.
        folder: for the tokenizer; it appears whole.
        training: the documents files. What is held out must not shape what it is measured with.
        held_out: those of the validation split; a pretrained tokenizer is tried on them too.
        passes: run what looks at many documents.

    Raises:
        UserError: a pretrained tokenizer is broken or loses text, or a chat template is broken.
    """
    recipe = data.tokenizer
    with fresh_folder(folder) as target:
        if recipe.is_given:
            copy_pretrained(str(recipe.path), target)
        elif recipe.kind == "bpe":
            save_tokenizer(train_bpe(_sample(training, passes), recipe.vocab_size), target)
        elif recipe.extension is not None:
            texts = _sample(training, passes)
            save_tokenizer(train_extension(recipe.extension, texts, recipe.vocab_size), target)
        elif recipe.kind == "byte":
            save_tokenizer(byte_tokenizer(), target)
        else:
            save_tokenizer(character_tokenizer(_alphabet(data, training, passes)), target)
        if data.instruction.is_chat:
            make_chat_tokenizer(target, data.instruction, fixed=recipe.kind == "model")
    if recipe.is_given:
        _check_round_trip(str(recipe.path), folder, (training, held_out), passes)


def _sample(training: Sequence[Path], passes: Passes) -> list[str]:
    """Return some MiB of documents: the only texts that the driver ever holds."""
    blocks = plan_text_blocks(training)
    step = -(-len(blocks) // _SAMPLED_BLOCKS)
    size = sum(int(sizes([path]).sum()) for path in training)
    task = partial(sample_texts, fraction=step * BPE_SAMPLE_BYTES / size)
    found = passes.run("sample", task, blocks[::step], list[str], "MiB sampled", mebibytes)
    return [text for _, texts in found for text in texts]


def _alphabet(data: Data, training: Sequence[Path], passes: Passes) -> set[str]:
    """Return the characters of the texts, and those that a chat template puts around them."""
    found = passes.run(
        "characters", characters, plan_text_blocks(training), str, "MiB looked through", mebibytes
    )
    is_chat = data.instruction.is_chat
    around = template_characters(data.instruction) if is_chat else ""
    return set(around).union(*(alphabet for _, alphabet in found))


def _check_round_trip(
    name: str, tokenizer: Path, splits: Sequence[Sequence[Path]], passes: Passes
) -> None:
    """Refuse a tokenizer that changes text: bits per byte would be had for less text."""
    groups = []
    for files in splits:
        found = row_groups(files)
        groups += found[:: max(1, len(found) // CHECKED_ROW_GROUPS)]
    task = partial(first_loss, tokenizer=tokenizer, tokenizer_hash=folder_hash(tokenizer))
    for _, loss in passes.run("round-trip", task, groups, str, "row groups checked"):
        if loss:
            raise UserError(
                f"{name}: this tokenizer does not give text back: {loss}; what it loses would "
                "count as predicted; give a lossless one, such as a byte-level BPE, in "
                "data.tokenizer.path, or set data.tokenizer.kind to bpe"
            )
