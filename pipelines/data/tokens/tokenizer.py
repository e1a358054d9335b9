"""Text to token ids and back: characters, bytes, a trained BPE, or someone else's tokenizer.

Every tokenizer is saved as a folder that `transformers.AutoTokenizer` loads, and text → ids → text
is exact for bytes and BPE, and for characters that the training text holds: nothing is stripped,
lower-cased or given a leading space. Each has an end-of-document token, the `eos_token` of its
`tokenizer_config.json`: `<|endoftext|>`, except that a pretrained tokenizer keeps its own.
"""

import json
import logging
import shutil
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipelines.core import extensions
from pipelines.core.errors import UserError
from pipelines.core.storage import md5, read_bytes, read_object, read_text, write_json
from pipelines.data.tokens.fast_encoder import TiktokenBpe, UnsuitedError, byte_alphabet
from pipelines.data.tokens.token_shards import Ids, token_dtype
from pipelines.recipe.data_section import Tokenizer as TokenizerRecipe
from pipelines.recipe.section import Extension

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<|unk|>"  # of a char tokenizer: a character that the training text lacks
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TIKTOKEN, TOKENIZERS = "tiktoken", "tokenizers"  # the engines of an encoder
# What a pretrained folder may hold beside tokenizer.json.
_COMPANIONS = (CONFIG_FILE, "special_tokens_map.json", "chat_template.jinja")
# A longest "no limit" that transformers itself writes.
_NO_LIMIT = 1_000_000_000_000_000_019_884_624_838_656

_log = logging.getLogger(__name__)


def character_tokenizer(characters: Iterable[str]) -> "Tokenizer":
    """Return one id a Unicode code point, after the ids of `<|endoftext|>` and `<|unk|>`."""
    from tokenizers import Tokenizer, decoders, models

    names = [END_OF_TEXT, UNKNOWN, *sorted(set(characters))]
    vocabulary = {name: index for index, name in enumerate(names)}
    # A BPE without merges is a table of characters, five times as fast as a split by regex.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END_OF_TEXT, UNKNOWN])
    return tokenizer


def byte_tokenizer() -> "Tokenizer":
    """Return a byte's id is its value; 256 is `<|endoftext|>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Return a byte-level BPE as GPT-2's, with at most `vocab_size` ids, `<|endoftext|>` the first.

    The same texts in the same order give the same tokenizer. About 2 to 4 MB of text a second.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=byte_alphabet(),  # so that any text can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_extension(extension: Extension, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Return the tokenizer that a team's own package makes.

    Raises:
        UserError: The extension is not installed, refuses its settings, or gives no
            `<|endoftext|>` or too many ids.
    """
    train = extensions.load("tokenizers", extension.name)
    made: Tokenizer = extensions.call(
        "tokenizers", extension.name, train, texts, vocab_size, **extension.settings
    )
    if made.token_to_id(END_OF_TEXT) is None or made.get_vocab_size() > vocab_size:
        raise UserError(
            f"the extension {extension.name} made a tokenizer of {made.get_vocab_size()} ids; it "
            f"must have at most data.tokenizer.vocab_size = {vocab_size}, {END_OF_TEXT} among them"
        )
    return made


def save_tokenizer(tokenizer: "Tokenizer", folder: Path) -> None:
    """Write a tokenizer of ours as a folder for `AutoTokenizer`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,  # it would take away spaces before punctuation
        "model_max_length": _NO_LIMIT,
    }
    if tokenizer.token_to_id(UNKNOWN) is not None:
        config["unk_token"] = UNKNOWN
    write_json(folder / CONFIG_FILE, config)


def load_pretrained(path: str | Path) -> "Tokenizer":
    """Return the tokenizer of a tokenizer.json or of a folder that holds one.

    Raises:
        UserError: no tokenizer.json lies there, or it is broken.
    """
    return _load(_pretrained_file(path))


def copy_pretrained(path: str | Path, folder: Path) -> None:
    """Copy a pretrained tokenizer, adding `<|endoftext|>` where it names no end of its own.

    Raises:
        UserError: no tokenizer.json lies there, or it is broken.
    """
    source = _pretrained_file(path)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _load(source)
    shutil.copyfile(source, folder / TOKENIZER_FILE)
    for file in _companions(source):
        (folder / file.name).write_bytes(read_bytes(file))
    if _end_token(folder) is None:
        tokenizer.add_special_tokens([END_OF_TEXT])  # nothing changes where it is there already
        tokenizer.save(str(folder / TOKENIZER_FILE))
        config = read_object(folder / CONFIG_FILE) if (folder / CONFIG_FILE).exists() else {}
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        write_json(folder / CONFIG_FILE, config | {"eos_token": END_OF_TEXT})


def tokenizer_fingerprint(recipe: TokenizerRecipe) -> list[dict[str, Any]]:
    """Name and md5 of each pretrained file: the tokenizer's part of the stage cache's key."""
    if not recipe.is_given:
        return []
    file = _pretrained_file(recipe.path or "")
    return [{"path": part.name, "md5": md5(part)} for part in (file, *_companions(file))]


class Encoder:
    """A saved tokenizer folder, ready to encode documents.

    tiktoken encodes what it is proven to encode as `tokenizers` does; `tokenizers` the rest. Both
    let other threads run meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _load(folder / TOKENIZER_FILE)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A document that spells out "<|endoftext|>" must not end there.
        self._tokenizer.encode_special_tokens = True
        end = _end_token(folder)
        end_id = None if end is None else self._tokenizer.token_to_id(end)
        if end_id is None:
            raise UserError(
                f"{folder / CONFIG_FILE}: eos_token {end!r} is not in {TOKENIZER_FILE}; "
                "name a token that is"
            )
        self.end_id: int = end_id

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id: the rows that an embedding needs."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def unknown_id(self) -> int | None:
        """The id that stands for whatever the vocabulary lacks; None where nothing is lacking."""
        from tokenizers import models

        model = self._tokenizer.model
        if isinstance(model, models.Unigram):  # the one kind that does not say it by name
            unknown: int | None = json.loads(self._tokenizer.to_str())["model"]["unk_id"]
            return unknown
        name = getattr(model, "unk_token", None)
        return None if name is None else self._tokenizer.token_to_id(name)

    @cached_property
    def engine(self) -> str:
        """`tiktoken`, or `tokenizers` and why: how most texts are encoded."""
        return TIKTOKEN if isinstance(self._fast, TiktokenBpe) else f"{TOKENIZERS}: {self._fast}"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return each document's ids, the end-of-document id last, in the shards' type."""
        fast = self._fast
        found = [fast.encode(text) if isinstance(fast, TiktokenBpe) else None for text in texts]
        left = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        encodings = iter(self._tokenizer.encode_batch_fast(left, add_special_tokens=False))
        return [self._ended(next(encodings).ids if ids is None else ids) for ids in found]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the exact text of ids, special tokens spelled out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def round_trip(self, text: str) -> tuple[str, str]:
        """Return a text and what comes back of it, with every unknown token spelled out in both.

        They are equal where nothing is lost but what unknown tokens stand for.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        known, done = [], 0
        for id_, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if id_ == self.unknown_id:
                known += [text[done:start], self.decode([id_])]
                done = stop
        return "".join([*known, text[done:]]), self.decode(encoding.ids)

    @cached_property
    def _fast(self) -> TiktokenBpe | UnsuitedError:
        """The fast engine, or why there is none."""
        try:
            fast = TiktokenBpe(json.loads(self._tokenizer.to_str()))
        except UnsuitedError as reason:
            return reason
        if fast.agrees_with(self._tokenizer):
            return fast
        _log.warning("tiktoken's ids differ from those of tokenizers, which therefore encodes")
        return UnsuitedError("tiktoken's ids differ")

    def _ended(self, ids: Sequence[int] | npt.NDArray[np.uint32]) -> Ids:
        """Ids in the shards' type with the end-of-document id behind them."""
        ended = np.empty(len(ids) + 1, token_dtype(self.vocab_size))
        ended[:-1] = ids
        ended[-1] = self.end_id
        return ended


def _load(file: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        text = read_text(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{file}: there is no such file; a model's folder needs its own") from error
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for whatever is wrong
        raise UserError(f"{file}: not a tokenizer.json ({error})") from error


def _pretrained_file(path: str | Path) -> Path:
    given = Path(path).expanduser()
    file = given / TOKENIZER_FILE if given.is_dir() else given
    if not file.is_file():
        raise UserError(
            f"{file}: no such file; data.tokenizer.path names a tokenizer.json "
            "or a folder that holds one"
        )
    return file


def _companions(file: Path) -> list[Path]:
    return [path for name in _COMPANIONS if (path := file.with_name(name)).is_file()]


def _end_token(folder: Path) -> str | None:
    """Return the `eos_token` of a tokenizer's folder: a string, or an object with `content`."""
    for name in (CONFIG_FILE, "special_tokens_map.json"):
        values = read_object(folder / name) if (folder / name).exists() else {}
        token = values.get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if token is not None:
            return str(token)
    return None
