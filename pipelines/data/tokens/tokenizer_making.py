"""The tokenizer of a dataset: trained on the training documents, or someone else's."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.recipe_data import Data
from pipelines.core.storage import folder_hash, fresh_folder
from pipelines.data.documents import row_groups, sizes
from pipelines.data.passes import Passes, mebibytes
from pipelines.data.tokens.chat_encoder import make_chat_tokenizer
from pipelines.data.tokens.chat_template import template_characters
from pipelines.data.tokens.tokenization import (
    characters,
    first_loss,
    plan_text_blocks,
    sample_texts,
)
from pipelines.data.tokens.tokenizer import (
    byte_tokenizer,
    character_tokenizer,
    copy_pretrained,
    save_tokenizer,
    train_bpe,
)

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
        if recipe.kind == "pretrained":
            copy_pretrained(str(recipe.path), target)
        elif recipe.kind == "bpe":
            save_tokenizer(train_bpe(_sample(training, passes), recipe.vocab_size), target)
        elif recipe.kind == "byte":
            save_tokenizer(byte_tokenizer(), target)
        else:
            save_tokenizer(character_tokenizer(_alphabet(data, training, passes)), target)
        if data.instruction.is_chat:
            make_chat_tokenizer(target, data.instruction)
    if recipe.kind == "pretrained":
        _check_round_trip(str(recipe.path), folder, (training, held_out), passes)


def _sample(training: Sequence[Path], passes: Passes) -> list[str]:
    """Some MiB of documents: the only texts that the driver ever holds."""
    blocks = plan_text_blocks(training)
    step = -(-len(blocks) // _SAMPLED_BLOCKS)
    size = sum(int(sizes([path]).sum()) for path in training)
    task = partial(sample_texts, fraction=step * BPE_SAMPLE_BYTES / size)
    found = passes.run("sample", task, blocks[::step], list[str], "MiB sampled", mebibytes)
    return [text for _, texts in found for text in texts]


def _alphabet(data: Data, training: Sequence[Path], passes: Passes) -> set[str]:
    """The characters of the texts, and those that a chat template puts around them."""
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
