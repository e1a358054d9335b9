"""Raw bytes become documents: UTF-8, Unicode NFC, line feeds; what is not text has a reason."""

import hashlib
import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

Messages = tuple[tuple[str, str], ...]  # of a conversation: the role and the content of each turn

EMPTY = "empty"
BINARY = "binary"
INVALID_UTF8 = "invalid_utf8"
DUPLICATE = "duplicate"
NEAR_DUPLICATE = "near_duplicate"
MALFORMED = "malformed"
PII = "pii"
CONTAMINATED = "contaminated:"  # before the evaluation set's name

_ASSISTANT = "assistant"  # the role that `reading.instruction` names
_PARAGRAPH_END = re.compile(r"\n[ \t]*\n+")
_BOM = "\ufeff"


class Document(NamedTuple):
    """A document that is kept, or what is known of one that is dropped."""

    source: str  # path relative to the source's root, or `file:line`
    text: str  # normalised; empty when dropped
    doc_id: str  # SHA-256 of the normalised text, hex; empty when dropped
    bytes: int  # of the normalised text as UTF-8, or of the raw input when dropped
    dropped: str | None = None  # the reason
    detail: str = ""  # of a malformed record: what is wrong with it
    messages: Messages = ()  # of a conversation; `text` is then what `join` makes of it
    rejected: Messages = ()  # of a pair: the conversation that `messages` is preferred to
    # Of an answer by itself, one of the two is the prompt alone.


def document(source: str, text: str) -> Document:
    """Normalise one text; empty, binary and unencodable texts come back dropped."""
    return _document(source, normalize(text))


def conversation(source: str, messages: Messages, rejected: Messages = ()) -> Document:
    """Normalise each turn of a conversation, or of a pair of them, as `document` does a text.

    What is no pair comes back dropped, but for an answer by itself and its prompt.
    """
    messages, rejected = (
        tuple((role, normalize(content)) for role, content in each) for each in (messages, rejected)
    )
    beyond = rejected[shared_turns(messages, rejected) :]
    found = _document(source, join(messages + beyond))
    is_pair = rejected and not single_answer(messages, rejected)
    if is_pair and not found.dropped and (fault := pair_fault(messages, rejected)):
        return drop(source, found.bytes, MALFORMED, fault)
    return found if found.dropped else found._replace(messages=messages, rejected=rejected)


def join(messages: Messages) -> str:
    """Return the text of a conversation: what filters, hashes and n-grams see of it."""
    return "\n\n".join(content for _, content in messages)


def shared_turns(chosen: Messages, rejected: Messages) -> int:
    """Return how many turns two conversations have in common before they differ."""
    turns = enumerate(zip(chosen, rejected, strict=False))
    shorter = min(len(chosen), len(rejected))
    return next((number for number, (one, other) in turns if one != other), shorter)


def single_answer(chosen: Messages, rejected: Messages) -> str | None:
    """Return which of two conversations is an answer whose prompt the other one is, or None."""
    for name, one, other in (("chosen", chosen, rejected), ("rejected", rejected, chosen)):
        if one[:-1] == other and one and one[-1][0] == _ASSISTANT:
            return name
    return None


def pair_fault(chosen: Messages, rejected: Messages) -> str | None:
    """Return why no preference can be learnt from two conversations, or None if it can."""
    if chosen == rejected:
        return "the chosen and the rejected answer are equal"
    shared = shared_turns(chosen, rejected)
    if shared in (len(chosen), len(rejected)):
        empty = "chosen" if shared == len(chosen) else "rejected"
        return f"the {empty} answer is empty: the other conversation goes on from it"
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if messages[shared][0] != _ASSISTANT:
            return (
                f"the conversations do not begin alike: message {shared + 1} of the {name} one "
                f"differs and is not the {_ASSISTANT}'s"
            )
        if messages[-1][0] != _ASSISTANT:
            return f"the {name} conversation does not end with a turn of the {_ASSISTANT}"
        if any(role == _ASSISTANT and not said.strip() for role, said in messages[shared:]):
            return f"the {name} answer is empty"
    return None


def _document(source: str, text: str) -> Document:
    if not text or text.isspace():
        return drop(source, len(text.encode(errors="surrogatepass")), EMPTY)
    if "\0" in text:
        return drop(source, len(text.encode(errors="surrogatepass")), BINARY)
    try:
        encoded = text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which a JSON escape can write
        return drop(source, len(text.encode(errors="surrogatepass")), INVALID_UTF8)
    return Document(source, text, hashlib.sha256(encoded).hexdigest(), len(encoded))


def drop(source: str, size: int, reason: str, detail: str = "") -> Document:
    """Return a document that is not kept."""
    return Document(source, "", "", size, reason, detail)


def decode(source: str, raw: bytes) -> str | Document:
    """Return the bytes of a text file as a string, or why they are not one."""
    if b"\0" in raw:
        return drop(source, len(raw), BINARY)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return drop(source, len(raw), INVALID_UTF8)


def normalize(text: str) -> str:
    """Unicode NFC, line feeds as line ends, no byte order marks at the start."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.isascii():  # known of every string; NFC would look at each character
        return text
    return unicodedata.normalize("NFC", text.lstrip(_BOM))


def cut(text: str, limit: int) -> Iterator[str]:
    """Cut a text into pieces of at most `limit` characters that join to the text again.

    A piece ends at a blank line where one lies within the limit, else at a line's end, else
    at a space, else after `limit` characters.
    """
    start = 0
    while len(text) - start > limit:
        stop = start + limit
        paragraphs = _PARAGRAPH_END.finditer(text, start + 1, stop)
        end = max((found.end() for found in paragraphs), default=0)
        end = end or text.rfind("\n", start, stop) + 1 or text.rfind(" ", start, stop) + 1 or stop
        yield text[start:end]
        start = end
    yield text[start:]
