"""Refuses a tokenizer that can't be read, or that is not the one of the model to start from.

A model knows ids and no words: on the ids of another tokenizer it trains without a word, and learns
anew what it knew. So tokenizers are compared by what each id means, not by how many there are.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pipelines.core.errors import UserError
from pipelines.data.reading.instruction import ASSISTANT, USER
from pipelines.data.tokens.chat_encoder import make_chat_tokenizer
from pipelines.data.tokens.chat_template import ChatTemplate, find_template, template_variables
from pipelines.data.tokens.tokenizer import (
    END_OF_TEXT,
    TOKENIZER_FILE,
    byte_tokenizer,
    copy_pretrained,
    load_pretrained,
    save_tokenizer,
)
from pipelines.datasets.versions import find, read_tokenizer
from pipelines.models.model_folder import load_config
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.section import registered_label
from pipelines.registry.parents import Settled

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_OWN = (
    "set data.tokenizer.kind = model, the model's own tokenizer, which writes a chat template's "
    "marks in the tokens that it has"
)
_BARE = (
    "that folder has no tokenizer.json: put the one that it was trained with there, or name it by "
    "data.tokenizer.kind = pretrained and data.tokenizer.path"
)
_MEANING = ("normalizer", "pre_tokenizer", "model")  # with the added tokens, what an id stands for


def check_tokenizer(run: Settled) -> None:
    """Load a tokenizer that is given."""
    recipe = run.ready
    if recipe.data.source.is_published or not recipe.data.tokenizer.is_given:
        return
    if recipe.data.tokenizer.kind == "model":
        if _is_unread(recipe):
            return
        if _own_tokenizer(recipe) is None:
            raise UserError(f"model.init_from = {recipe.model.init_from}: {_BARE}")
    load_pretrained(str(recipe.data.tokenizer.path))


def check_template(run: Settled) -> None:
    """Render a small conversation by the chat template."""
    recipe, instruction = run.ready, run.ready.data.instruction
    if recipe.data.source.is_published or not instruction.is_chat or _is_unread(recipe):
        return
    folder = _tokenizer_folder(recipe)
    names = ("bos_token", "eos_token", "pad_token")
    variables = template_variables(folder) if folder else dict.fromkeys(names, END_OF_TEXT)
    template = find_template(instruction, folder)
    ChatTemplate(template, variables, re.compile(r"(?!)")).render(((USER, "a"), (ASSISTANT, "b")))


def check_base_tokenizer(run: Settled) -> None:
    """Compare the tokenizer of text that is still to be tokenized with that of the base."""
    recipe, base = run.ready, run.ready.model.init_from
    if base is None or recipe.data.source.is_published or _is_unread(recipe):
        return
    kind, own = recipe.data.tokenizer.kind, _own_tokenizer(recipe)
    if kind not in ("byte", "pretrained", "model"):
        _refuse(recipe, f"data.tokenizer.kind = {kind!r} makes a new tokenizer", own)
    if kind == "model" and own is None:
        return  # which `check_tokenizer` tells
    with tempfile.TemporaryDirectory() as scratch:
        made = _make(recipe, Path(scratch))
    if own and kind != "model" and not _mean_the_same(made, own):
        _refuse(recipe, "data.tokenizer is another tokenizer", own)
    ids = _parsed(made).get_vocab(with_added_tokens=True).values()
    _check_size(recipe, "data.tokenizer", max(ids) + 1)


def check_dataset_tokenizer(run: Settled) -> None:
    """Compare the tokenizer of a dataset version with that of the base."""
    recipe, source = run.ready, run.ready.data.source
    if recipe.model.init_from is None or not source.is_published:
        return
    # Those of a mixture share one tokenizer, or they could not be mixed.
    version = find(next(iter(source.mixture), str(source.path)))
    own = _own_tokenizer(recipe)
    if own and not _mean_the_same(read_tokenizer(version), own):
        _refuse(recipe, f"data.source: {version.label} has the ids of another tokenizer", own)
    _check_size(recipe, f"data.source: {version.label}", version.dataset.vocab_size)


def _is_unread(recipe: Recipe) -> bool:
    """Return whether the base is a registered model whose files were not asked for."""
    return registered_label(recipe.model.init_from) is not None


def _own_tokenizer(recipe: Recipe) -> Path | None:
    own = Path(str(recipe.model.init_from)) / TOKENIZER_FILE
    return own if own.is_file() else None


def _tokenizer_folder(recipe: Recipe) -> Path | None:
    if not recipe.data.tokenizer.is_given:
        return None
    given = Path(str(recipe.data.tokenizer.path)).expanduser()
    return given if given.is_dir() else given.parent


def _make(recipe: Recipe, folder: Path) -> str:
    """Return the tokenizer.json that preprocess will make, where no text shapes it."""
    tokenizer, instruction = recipe.data.tokenizer, recipe.data.instruction
    if tokenizer.kind == "byte":
        save_tokenizer(byte_tokenizer(), folder)
    else:
        copy_pretrained(str(tokenizer.path), folder)
    if instruction.is_chat:
        make_chat_tokenizer(folder, instruction, fixed=tokenizer.kind == "model")
    return (folder / TOKENIZER_FILE).read_text(encoding="utf-8")


def _parsed(content: str) -> "Tokenizer":
    from tokenizers import Tokenizer

    return Tokenizer.from_str(content)


def _mean_the_same(used: str, own: Path) -> bool:
    """Return whether no id of a tokenizer means something else to the base; it may have more."""
    if used == own.read_text(encoding="utf-8"):
        return True
    # As the library writes them, whichever version of it wrote the files.
    ours, theirs = (json.loads(each.to_str()) for each in (_parsed(used), load_pretrained(own)))
    if any(ours[part] != theirs[part] for part in _MEANING):
        return False
    known = {token["id"]: token["content"] for token in theirs["added_tokens"]}
    return all(known.get(t["id"], t["content"]) == t["content"] for t in ours["added_tokens"])


def _check_size(recipe: Recipe, what: str, wanted: int) -> None:
    known = load_config(Path(str(recipe.model.init_from))).vocab_size
    if wanted > known:
        told = f"{what} gives {wanted} token ids, but the vocabulary of model.init_from = "
        raise UserError(f"{told}{recipe.model.init_from} is {known}; {_advice(recipe)}")


def _refuse(recipe: Recipe, what: str, own: Path | None) -> NoReturn:
    raise UserError(
        f"{what}, but model.init_from = {recipe.model.init_from} knows the ids of the one that it "
        f"was trained with; {_advice(recipe) if own else _BARE}"
    )


def _advice(recipe: Recipe) -> str:
    if recipe.data.source.is_published:
        return "publish data that are made with data.tokenizer.kind = model and this model"
    if recipe.data.tokenizer.kind == "model":
        return "its tokenizer.json is another model's"
    return _OWN
