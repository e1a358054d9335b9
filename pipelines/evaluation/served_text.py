"""Whether a server makes the tokens of text and conversations that the model was trained on."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.core.errors import UserError
from pipelines.data.normalize import Messages
from pipelines.data.tokens.chat_encoder import ChatEncoder, EncodedChat
from pipelines.data.tokens.token_shards import (
    Ids,
    ShardIndex,
    bin_path,
    idx_path,
    mask_path,
    shard_prefix,
)
from pipelines.data.tokens.tokenization import encode_table
from pipelines.data.tokens.tokenizer import Encoder
from pipelines.evaluation.held_out_documents import conversations
from pipelines.evaluation.served_weights import tried
from pipelines.models.model_folder import CONFIG, read_object
from pipelines.run.records import DatasetRef
from pipelines.run.verdict import ServedCheck, ServedCheckName

_MOST_DOCUMENTS = 64
_MOST_TEXT = 1 << 16  # characters of a document
_MOST_TOKENS = 1 << 24  # of the held-out shards
# Templates that put the date in take this one; the trained text has none.
_NO_DATE = {"date_string": "26 Jul 2024"}
_log = logging.getLogger(__name__)


def check_text(
    folder: Path, preprocess: Path, dataset: DatasetRef, documents: pa.Table
) -> tuple[ServedCheck, ...]:
    """Compare the tokens that a server makes of text with those that the model was trained on.

    Args:
        folder: The folder that is served.
        preprocess: The outputs of preprocess: the tokenizer and the held-out shards.
        dataset: Their record.
        documents: Held-out documents, with text and, of conversations, messages.
    """
    some = documents.slice(0, _MOST_DOCUMENTS)
    messages = conversations(some)
    texts = [
        text[:_MOST_TEXT]
        for text, talk in zip(some["text"].to_pylist(), messages, strict=True)
        if not talk
    ]
    talks = [talk for talk in messages if talk]
    trained = preprocess / "tokenizer"
    checks: list[tuple[ServedCheckName, Callable[[], ServedCheck]]] = []
    if texts:
        checks.append(("tokenizer", partial(_tokenizer, folder, trained, texts)))
    if talks:
        checks.append(("conversations", partial(_conversations, folder, trained, talks)))
    checks.append(
        ("training data", partial(_training_data, folder, preprocess, dataset, some, messages))
    )
    checks.append(("end of text", partial(_end_of_text, folder, trained, talks)))
    return tuple(tried(name, folder, check) for name, check in checks)


def _transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _tokenizer(folder: Path, trained: Path, texts: list[str]) -> ServedCheck:
    """A server makes the ids of a text that training had, after at most one token that begins."""
    served = _transformers_tokenizer(folder)
    wanted = Encoder(trained).encode(texts)
    for number, (text, ids) in enumerate(zip(texts, wanted, strict=True), 1):
        if _spells_out_a_mark(served, text):
            continue
        made = served(text)["input_ids"]
        if made[:1] == [served.bos_token_id] != ids[:1].tolist():
            made = made[1:]
        if problem := _difference(ids[:-1], made):
            return ServedCheck(name="tokenizer", holds=False, found=f"text {number}: {problem}")
    total = sum(len(ids) - 1 for ids in wanted)
    found = f"the same {total} ids of {len(texts)} held-out texts"
    return ServedCheck(name="tokenizer", holds=True, found=found)


def _conversations(folder: Path, trained: Path, talks: list[Messages]) -> ServedCheck:
    """The chat template of the folder renders the ids that training had."""
    served = _transformers_tokenizer(folder)
    compared = total = 0
    for number, (talk, chat) in enumerate(_encoded(trained, talks), 1):
        if any(_spells_out_a_mark(served, text) for _, text in talk):
            continue
        turns = [{"role": role, "content": text} for role, text in talk]
        made = served.apply_chat_template(turns, return_dict=False, **_NO_DATE)
        ids = chat.ids if len(made) == len(chat.ids) else chat.ids[:-1]  # less the end of text
        if problem := _difference(ids, made):
            found = f"conversation {number}: {problem}"
            return ServedCheck(name="conversations", holds=False, found=found)
        compared, total = compared + 1, total + len(ids)
    found = f"the same {total} ids of {compared} held-out conversations"
    return ServedCheck(name="conversations", holds=True, found=found)


def _spells_out_a_mark(served: Any, text: str) -> bool:
    """Return whether a text holds a special token's, which training takes as text, unlike this."""
    return any(mark in text for mark in served.all_special_tokens)


def _encoded(folder: Path, talks: Sequence[Messages]) -> Iterator[tuple[Messages, EncodedChat]]:
    """Yield the conversations that a folder's template can render, with their ids."""
    encoder = ChatEncoder(folder)
    for talk in talks:
        try:
            (chat,) = encoder.encode([talk])
        except UserError as error:
            _log.info("a held-out conversation is left out: %s", error)
            continue
        yield talk, chat


def _difference(trained: Ids, served: Sequence[int]) -> str:
    """Return where ids first differ; an empty text if they do not."""
    ours, theirs = trained.tolist(), list(served)
    if ours == theirs:
        return ""
    place = next(
        (at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
        min(len(ours), len(theirs)),
    )
    first, second = (ids[place] if place < len(ids) else "nothing" for ids in (ours, theirs))
    return f"token {place} was {first} in training, and a server makes {second}"


def _training_data(
    folder: Path,
    preprocess: Path,
    dataset: DatasetRef,
    documents: pa.Table,
    messages: list[Messages],
) -> ServedCheck:
    """The held-out shards hold the served tokenizer's ids, and the loss mask of its template."""
    name: ServedCheckName = "training data"
    split = dataset.validation
    prefixes = [shard_prefix(preprocess / shard.path) for shard in split.shards]
    if split.tokens > _MOST_TOKENS or not all(bin_path(each).is_file() for each in prefixes):
        found = f"not compared: the {split.tokens} held-out tokens are too many, or are elsewhere"
        return ServedCheck(name=name, holds=True, found=found)
    stored = defaultdict(set)  # pairs may begin with one conversation and part at several places
    for ids_bytes, mask_bytes in chain.from_iterable(map(_sequences, prefixes)):
        stored[ids_bytes].add(mask_bytes)
    longest = dataset.packed_length or split.tokens  # a longer document is cut
    found_all = 0
    if dataset.pairs:
        made = _of_pairs(folder, documents, longest + 1)
    else:
        made = _of_documents(folder, documents, messages)
    for number, (ids, mask) in enumerate(made, 1):
        if len(ids) > longest:
            continue
        key = ids.tobytes()
        if key not in stored:
            found = f"held-out document {number}: its {len(ids)} ids are not in the shards"
            return ServedCheck(name=name, holds=False, found=found)
        if not stored[key] & {mask.tobytes(), None}:
            found = f"held-out document {number}: other tokens were learnt than the template says"
            return ServedCheck(name=name, holds=False, found=found)
        found_all += 1
    found = f"ids and loss masks of {found_all} held-out documents are those in the shards"
    return ServedCheck(name=name, holds=True, found=found)


def _sequences(prefix: Path) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield the ids and the mask, if there is one, of each sequence of a shard."""
    index = ShardIndex(idx_path(prefix))
    ids = np.fromfile(bin_path(prefix), index.dtype)
    path = mask_path(prefix)
    mask = np.fromfile(path, np.uint8) if path.is_file() else None
    offsets = index.sequence_offsets().tolist()
    for start, stop in pairwise(offsets):
        yield ids[start:stop].tobytes(), None if mask is None else mask[start:stop].tobytes()


def _of_documents(
    folder: Path, documents: pa.Table, messages: list[Messages]
) -> Iterator[tuple[Ids, Any]]:
    """Yield each document's ids and mask as the served folder makes them."""
    texts = documents["text"].to_pylist()
    plain = [text for text, talk in zip(texts, messages, strict=True) if not talk]
    for ids in Encoder(folder).encode(plain):
        yield ids, np.ones(len(ids), np.uint8)
    talks = [talk for talk in messages if talk]
    for _, chat in _encoded(folder, talks) if talks else ():
        yield chat.ids, chat.mask


def _of_pairs(folder: Path, documents: pa.Table, capacity: int) -> Iterator[tuple[Ids, Any]]:
    """Yield the same of both conversations of each pair that a sample holds."""
    pairs = documents.select(["messages", "rejected"])
    for chat in encode_table(ChatEncoder(folder), pairs, capacity):
        yield chat.ids, chat.mask


def _end_of_text(folder: Path, trained: Path, talks: list[Messages]) -> ServedCheck:
    """A server stops at what the model learnt to end with."""
    from transformers import GenerationConfig

    stops = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    stops = set(stops if isinstance(stops, list) else [stops])
    end = Encoder(trained).end_id
    ends = {end: "the end of a document"}
    if talks:
        ends = {
            int(chat.ids[chat.mask == 1][-1]): "the end of an answer"
            for _, chat in _encoded(trained, talks)
        }
        ends[ChatEncoder(trained).end_of_answer] = "the mark after an answer"
    for id_, what in ends.items():
        if id_ not in stops:
            found = f"{what} is token {id_}, but generation_config.json stops at {sorted(stops)}"
            return ServedCheck(name="end of text", holds=False, found=found)
    said = read_object(folder / CONFIG).get("eos_token_id")
    if end not in (said if isinstance(said, list) else [said]):
        found = f"the end of a document is token {end}, but {CONFIG} says {said}"
        return ServedCheck(name="end of text", holds=False, found=found)
    found = f"generation stops at {', '.join(map(str, sorted(stops)))}, as the model learnt"
    return ServedCheck(name="end of text", holds=True, found=found)
