"""Byte-level BPE by tiktoken: the ids of `tokenizers`, at several times its speed.

`tokenizers` merges the pair that comes first in its list of merges; tiktoken the pair whose whole
has the lowest id, listed or not. Why the ids are the same nevertheless:

A token is *sound* if merging its own bytes, listed merges of older tokens only, ends in it. Take
merges listed in the order of the ids that they make, and a text in which only sound tokens are
made. When a pair that makes T is the lowest, nothing has crossed the ends of T's span, so all
within came about as it does in T alone: the pair is the listed one, and both engines merge it, the
leftmost first. A token that is not sound, or can be made from one that isn't, is *disputed*. Tokens
only grow, into disputed ones again: a result of tiktoken without a disputed id is proven the same;
one with such an id is thrown away, and `tokenizers` encodes the text.

Both cut the text by the same regular expression, and the two engines of those read it alike, which
tests hold for each of `PATTERNS` over all of Unicode.
"""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ENGLISH = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_ENGLISH}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_GPT4 = (
    rf"(?i:{_ENGLISH})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+(?i:{_ENGLISH})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*(?i:{_ENGLISH})?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "GPT-2": _GPT2,
    "GPT-4, Llama 3": _GPT4,
    "Qwen 2": _GPT4.replace(r"\p{N}{1,3}", r"\p{N}"),
    "GPT-4o": _GPT4O,
}
# Settings of the model with which a text is merged in another way.
_FOREIGN = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")

HARD_TEXTS = (
    "  Isn't it? WE'LL see 'S '\u017f ''ve\t\ttabs\r\n\r\n \n  x = 1234567890.5e-10 \x00\x1c\x85",
    "日本語 のテキスト。한국어 \u1112\u1161\u11ab e\u0301 ǅ Ünïcödé\u00a0Ωδή\u3000صح ٣४Ⅷ½²",
    "😀👩‍👩‍👧🏽 \ufeff\u200b\u2028\u2029 \ufffd\U0010ffff <|endoftext|> ",
    # Letters and digits new in Unicode 14 to 17: where the engines know different versions.
    "\u0870 \U0001e4d0 \U00031350 \U0002ebf0 \u1c89 \U00010d40 \U00016d40 \U00010940 \U000323b0",
    " " * 700 + "x" + "\n" * 700 + "a" * 700 + "=" * 700 + "ab" * 700 + "é" * 700 + "7" * 700,
    "".join(map(chr, range(0x250))),
)


class UnsuitedError(Exception):
    """Why tiktoken cannot stand in for a tokenizer."""


class TiktokenBpe:
    """What tiktoken makes of a tokenizer of `tokenizers`.

    Raises:
        UnsuitedError: the same ids cannot be promised.
    """

    def __init__(self, definition: dict[str, Any]) -> None:
        """Take the content of a `tokenizer.json`; some three seconds for a vocabulary of 128k."""
        import tiktoken

        pattern, model = split_pattern(definition), definition["model"]
        self._ascii_only = normalizes(definition)
        self._taken_out = [
            token["content"] for token in definition["added_tokens"] if not token["special"]
        ]
        vocabulary = byte_vocabulary(model)
        self._disputed = _disputed(model, vocabulary)
        # It looks for special tokens first. Without any it would look for the empty string, which
        # is everywhere; this one is no text.
        special = {"\uffff": len(self._disputed)}
        self._tiktoken = tiktoken.Encoding(
            "", pat_str=pattern, mergeable_ranks=vocabulary, special_tokens=special
        )

    def encode(self, text: str) -> npt.NDArray[np.uint32] | None:
        """Return the ids of a text; None for one that `tokenizers` must encode."""
        if self._ascii_only and not text.isascii():
            return None
        if any(token in text for token in self._taken_out):
            return None
        try:
            ids = self._tiktoken.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # a million spaces are too much for its regular expressions
            return None
        return None if self._disputed[ids].any() else ids

    def agrees_with(self, tokenizer: "Tokenizer") -> bool:
        """Return whether both give the same ids for texts that are hard to cut alike."""
        found = ((self.encode(text), text) for text in HARD_TEXTS)
        return all(
            ids is None or ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids
            for ids, text in found
        )


def byte_alphabet() -> list[str]:
    """Return the printable stand-in of each byte, by byte value, as GPT-2's `bytes_to_unicode`."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: 256 + index for index, byte in enumerate(others)}
    return [chr(stand_ins.get(byte, byte)) for byte in range(256)]


def split_pattern(definition: dict[str, Any]) -> str:
    """Return the regular expression by which a text is cut into what is merged apart.

    Args:
        definition: The content of a `tokenizer.json`.

    Raises:
        UnsuitedError: It is none of `PATTERNS`.
    """
    match definition["pre_tokenizer"]:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}} as split,
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if pattern in PATTERNS.values():
            # No text lies between two matches, so that the second means the same as the first.
            if (split["behavior"], split["invert"]) in (("Isolated", False), ("Removed", True)):
                return str(pattern)
    raise UnsuitedError("text is cut in a way that is not known here")


def normalizes(definition: dict[str, Any]) -> bool:
    """Return whether text other than ASCII may be changed before it is cut.

    Raises:
        UnsuitedError: ASCII may be changed, too.
    """
    match definition["normalizer"]:
        case None:
            return False
        case {"type": "NFC"}:
            return True
    raise UnsuitedError("text is normalised")


def byte_vocabulary(model: dict[str, Any]) -> dict[bytes, int]:
    """Return the id of each token that bytes can be merged into.

    Raises:
        UnsuitedError: The model is no BPE of bytes, or merges in another way than tiktoken.
    """
    if model["type"] != "BPE":
        raise UnsuitedError(f"the model is {model['type']}, not BPE")
    for setting in _FOREIGN:
        if model[setting]:
            raise UnsuitedError(f"the model has {setting}")
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    if not byte_of.keys() <= model["vocab"].keys():
        raise UnsuitedError("not every byte has an id")
    # A token of other characters (of an added one, say) is never met.
    return {
        bytes(byte_of[character] for character in name): id_
        for name, id_ in model["vocab"].items()
        if byte_of.keys() >= set(name)
    }


def _disputed(model: dict[str, Any], vocabulary: dict[bytes, int]) -> npt.NDArray[np.bool_]:
    """Tell by id whether the two engines may differ in a text whose result holds it."""
    ids = model["vocab"]
    made = [ids[left + right] for left, right in model["merges"]]
    if any(first > second for first, second in pairwise(made)):
        raise UnsuitedError("merges are not in the order of ids")
    age = ids | dict.fromkeys(byte_alphabet(), -1)  # bytes are older than any token
    merges = [
        (left, right)
        for (left, right), whole in zip(model["merges"], made, strict=True)
        if age[left] < whole and age[right] < whole
    ]
    if len(merges) < len(made) and not model["ignore_merges"]:
        raise UnsuitedError("a merge joins what is made after it")
    unsound = _unsound(ids, merges)
    disputed = {token for token, id_ in vocabulary.items() if id_ in unsound}
    for token in sorted(vocabulary, key=len):  # the parts of a token are shorter
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        if any(
            (left in disputed or right in disputed) and left in vocabulary and right in vocabulary
            for left, right in cuts
        ):
            disputed.add(token)
    by_id = np.zeros(max(ids.values()) + 1, np.bool_)
    by_id[[vocabulary[token] for token in disputed]] = True
    return by_id


def _unsound(ids: dict[str, int], merges: list[tuple[str, str]]) -> set[int]:
    """Return tokens that merging their own bytes doesn't end in."""
    from tokenizers import Tokenizer, models

    alone = Tokenizer(models.BPE(vocab=ids, merges=merges))
    encodings = alone.encode_batch_fast(list(ids), add_special_tokens=False)
    ends = zip(ids.values(), encodings, strict=True)
    return {id_ for id_, encoding in ends if encoding.ids != [id_]}
