"""Conversations to token ids, and to a mask that says which of them are to be predicted.

The ids are those of `AutoTokenizer.apply_chat_template`, but that no message can write a special
token: where one spells out `<|im_end|>`, the text is cut within, so that only the template's own
marks become what they mean.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipelines.core.errors import UserError
from pipelines.data.normalize import Messages
from pipelines.data.reading.instruction import ASSISTANT
from pipelines.data.tokens.chat_template import (
    CHATML,
    CHATML_MARKERS,
    PLAIN_CHATML,
    ChatTemplate,
    Range,
    Rendered,
    find_template,
    own_template,
    save_template,
    template_variables,
)
from pipelines.data.tokens.token_shards import Ids, Mask, token_dtype
from pipelines.data.tokens.tokenizer import TOKENIZER_FILE, Encoder
from pipelines.recipe.data_section import Instruction

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class EncodedChat(NamedTuple):
    """A conversation in the shards' type."""

    ids: Ids  # [tokens], the end-of-document id last
    mask: Mask  # [tokens], 1 where the token is the assistant's
    said: str  # the text of those tokens


def make_chat_tokenizer(folder: Path, instruction: Instruction, *, fixed: bool = False) -> None:
    """Give a saved tokenizer its chat template, and ChatML's marks where that is used.

    Args:
        folder: The tokenizer's folder.
        instruction: Names the template, if it is not the tokenizer's own.
        fixed: The vocabulary is a model's and cannot grow: unknown marks are ordinary text.

    Raises:
        UserError: the template that the recipe names cannot be read.
    """
    template = find_template(instruction, folder)
    if template == CHATML:
        tokenizer = _load(folder)
        if fixed and None in map(tokenizer.token_to_id, CHATML_MARKERS):
            template = PLAIN_CHATML
        else:
            tokenizer.add_special_tokens(list(CHATML_MARKERS))  # no change where they are known
            tokenizer.save(str(folder / TOKENIZER_FILE))
    save_template(template, folder)


class ChatEncoder:
    """A saved tokenizer folder, ready to encode conversations; ChatML if it has no template."""

    def __init__(self, folder: Path) -> None:
        plain = Encoder(folder)
        template = own_template(folder) or CHATML
        self._end_id, self._end = plain.end_id, plain.decode([plain.end_id])
        self._dtype = token_dtype(plain.vocab_size)
        self._tokenizer = _load(folder)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        special = {
            token.content: id_
            for id_, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special and id_ != plain.unknown_id
        }
        self.special_ids = frozenset(special.values())
        longest_first = sorted(special, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._template = ChatTemplate(template, template_variables(folder), self._markers)

    def encode(
        self, conversations: Sequence[Messages], given: Sequence[int] = ()
    ) -> list[EncodedChat]:
        """Return each conversation's ids and mask.

        Args:
            conversations: each a sequence of turns.
            given: of each, how many turns at its beginning are not predicted, though the assistant
                may speak there; nothing for none.

        Raises:
            UserError: the template cannot render one, see `ChatTemplate.render`.
        """
        chats = [self._template.render(messages) for messages in conversations]
        cuts = [self._cuts(*pair) for pair in zip(conversations, chats, strict=True)]
        pieces = [
            chat.text[start:stop]
            for chat, bounds in zip(chats, cuts, strict=True)
            for start, stop in pairwise(bounds)
        ]
        encodings = iter(self._tokenizer.encode_batch(pieces, add_special_tokens=False))
        given = given or [0] * len(chats)
        return [
            self._encoded(messages, _predicted(messages, chat, turns), bounds, encodings)
            for messages, chat, bounds, turns in zip(conversations, chats, cuts, given, strict=True)
        ]

    def decode(self, ids: Ids) -> str:
        """Return the text of ids, special tokens included."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def encode_prompt(self, messages: Messages) -> Ids:
        """Return the ids of a conversation up to where the assistant is to answer."""
        (chat,) = self.encode([(*messages, (ASSISTANT, "."))])
        begins = np.flatnonzero(np.diff(chat.mask.astype(np.int8), prepend=0) == 1)
        answered = sum(role == ASSISTANT for role, _ in messages)
        return chat.ids[: begins[answered]]

    @cached_property
    def end_of_answer(self) -> int:
        """The id at which an answer ends: the first special one after its text."""
        (chat,) = self.encode([(("user", "."), (ASSISTANT, "."))])
        learnt = chat.ids[chat.mask == 1].tolist()
        said = [place for place, id_ in enumerate(learnt) if "." in self.decode(np.array([id_]))]
        after = learnt[said[-1] + 1 :]
        return next((int(id_) for id_ in after if id_ in self.special_ids), self._end_id)

    def _cuts(self, messages: Messages, chat: Rendered) -> list[int]:
        """0, the text's end, and between them a place within each mark that a message spells out.

        A mark is the template's where no character of it is a message's.
        """
        contents = chat.contents
        if contents is None:
            if any(self._markers.search(content) for _, content in messages):
                raise UserError(
                    "a message spells out a special token, and the chat template rewrites messages "
                    "so that it cannot be told from its own; take the document out"
                )
            contents = ()
        cuts = [0]
        position = 0
        while found := self._markers.search(chat.text, position):
            start, stop = found.span()
            if any(start < end and begin < stop for begin, end in contents):
                stop = start + 1
                cuts.append(stop)
            position = stop
        return [*cuts, len(chat.text)]

    def _encoded(
        self, messages: Messages, chat: Rendered, cuts: Sequence[int], pieces: Iterator[Any]
    ) -> EncodedChat:
        ids: list[int] = []
        ranges: list[Range] = []
        for start in cuts[:-1]:
            piece = next(pieces)
            ids += piece.ids
            ranges += [(start + begin, start + end) for begin, end in piece.offsets]
        self._check_marks(ids, chat.text, len(cuts) - 2)
        begins, ends = np.array(ranges, np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), np.uint8)
        for start, stop in chat.answers:
            mask[(ends > start) & (begins < stop)] = 1
        said = "".join(chat.text[start:stop] for start, stop in chat.answers)
        if ids[-1] != self._end_id:
            ids.append(self._end_id)
            mask = np.append(mask, np.uint8(messages[-1][0] == ASSISTANT))
            said += self._end * int(mask[-1])
        return EncodedChat(np.array(ids, self._dtype), mask, said)

    def _check_marks(self, ids: list[int], text: str, spelled_out: int) -> None:
        """No tokenizer known does this; a mark that a message wrote would be a way in."""
        written = sum(1 for _ in self._markers.finditer(text)) - spelled_out
        if sum(id_ in self.special_ids for id_ in ids) > written:
            raise UserError(
                "the tokenizer makes special tokens of what a message spells out; use another in "
                f"data.tokenizer.path (in {text[:80]!r})"
            )


def _predicted(messages: Messages, chat: Rendered, given: int) -> Rendered:
    """Return the rendered conversation without the answers among its first `given` turns."""
    spoken = [number for number, (role, _) in enumerate(messages) if role == ASSISTANT]
    if given and len(chat.answers) != len(spoken):
        raise UserError(
            f"the chat template marks {len(chat.answers)} answers of {len(spoken)}, so that those "
            "which a pair of conversations has in common can't be told from the others; give "
            "another in data.instruction.chat_template"
        )
    return chat._replace(answers=chat.answers[sum(number < given for number in spoken) :])


def _load(folder: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / TOKENIZER_FILE))
