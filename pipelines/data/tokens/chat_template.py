"""Conversations as one text: a Jinja chat template, and which characters the assistant says.

The template is the one that the recipe names, else the tokenizer's own, else ChatML. It is rendered
by `transformers`, in its sandbox: it can run no code and reads no clock, so that a conversation
always gives the same text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.core.errors import UserError
from pipelines.core.storage import read_object, read_text, write_text
from pipelines.data.normalize import Messages
from pipelines.data.reading.instruction import ASSISTANT, ROLES
from pipelines.recipe.data_section import Instruction

TEMPLATE_FILE = "chat_template.jinja"
IM_START, IM_END = CHATML_MARKERS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{%- for message in messages %}"
    "{{- '" + IM_START + "' + message['role'] + '\\n' + message['content'] + '" + IM_END + "\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '" + IM_START + "assistant\\n' }}{%- endif %}"
)
# For a model whose vocabulary lacks these marks: they are ordinary text, and a turn ends with the
# token that ends a document, where every server stops.
PLAIN_CHATML = CHATML.replace(f"'{IM_END}\\n'", "eos_token + '\\n'")
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
_STAND_IN = "\ue000{}\ue001"  # for a message's content
# Templates that put today's date in do without where the function is not defined. The empty
# expression keeps Jinja from taking a line break behind the tag away.
_NO_CLOCK = "{% set strftime_now = the_time_is_not_known %}{{ '' }}"
_ADVICE = (
    "give a template that marks what the assistant says with {% generation %} in "
    "data.instruction.chat_template"
)

Range = tuple[int, int]  # of characters: the first, one past the last


class Rendered(NamedTuple):
    """A conversation's text."""

    text: str
    answers: tuple[Range, ...]  # what the assistant is to say, with the marks that end its turns
    contents: tuple[Range, ...] | None  # of the messages; None where the template rewrote one


@dataclass(frozen=True)
class _Skeleton:
    """What a template writes around the contents, for one sequence of roles."""

    segments: tuple[str, ...]  # before, between and behind the contents
    leads: tuple[int, ...]  # of each content: characters before it that the assistant says
    tails: tuple[int, ...]  # and behind it


def find_template(instruction: Instruction, folder: Path | None = None) -> str:
    """Return the template for a tokenizer's folder, or for a tokenizer that is still to be made.

    Raises:
        UserError: the file that the recipe names cannot be read.
    """
    if instruction.chat_template:
        path = Path(instruction.chat_template).expanduser()
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{path}: cannot be read ({error}); fix data.instruction.chat_template"
            ) from error
    return (own_template(folder) if folder else None) or CHATML


def own_template(folder: Path) -> str | None:
    """Return the template of a tokenizer's folder: a file, or a value in its configuration."""
    if (folder / TEMPLATE_FILE).is_file():
        return read_text(folder / TEMPLATE_FILE)
    config = folder / "tokenizer_config.json"
    found = read_object(config).get("chat_template") if config.is_file() else None
    if isinstance(found, list):  # several, each with a name
        named = (each for each in found if isinstance(each, dict) and each.get("name") == "default")
        found = next(named, {}).get("template")
    if not isinstance(found, str | None):
        raise UserError(f"{config}: its chat_template is no text; fix it, or leave it out")
    return found


def template_characters(instruction: Instruction) -> str:
    """Return what a character tokenizer must know beside the conversations' own characters."""
    template = find_template(instruction)
    return "".join(sorted({*template, *"".join(ROLES), "\n", "\t"}))  # Jinja may escape those two


def save_template(template: str, folder: Path) -> None:
    """Write it where `AutoTokenizer` finds it."""
    write_text(folder / TEMPLATE_FILE, template)


class ChatTemplate:
    """A template, ready to render."""

    def __init__(self, source: str, variables: dict[str, str], markers: re.Pattern[str]) -> None:
        """Check nothing yet; a template that is broken says so when it is rendered.

        Args:
            source: Jinja.
            variables: Names of special tokens as the template knows them, such as `eos_token`.
            markers: What matches a special token.
        """
        self._source = _NO_CLOCK + source if "strftime_now" in source else source
        self._variables = variables
        self._markers = markers
        self._skeletons: dict[tuple[str, ...], _Skeleton] = {}

    def render(self, messages: Messages) -> Rendered:
        """Return the text of a conversation, and where in it the messages and the answers are.

        Raises:
            UserError: the template refuses the conversation, or does not let what the assistant
                says be told from what it is given.
        """
        text, marked = self._render(messages)
        if self._has_generation_marks:
            try:
                contents = self._places(messages, text)
            except UserError:  # not needed for the answers
                contents = None
            return Rendered(text, marked, contents)
        contents = self._places(messages, text)
        if contents is None:
            return Rendered(text, self._answers_between_prompts(messages, text), None)
        skeleton = self._skeleton(tuple(role for role, _ in messages))
        answers = [
            (start - lead, stop + tail)
            for (role, _), (start, stop), lead, tail in zip(
                messages, contents, skeleton.leads, skeleton.tails, strict=True
            )
            if role == ASSISTANT
        ]
        return Rendered(text, tuple(answers), contents)

    @cached_property
    def _has_generation_marks(self) -> bool:
        return _GENERATION.search(self._source) is not None

    def _render(self, messages: Messages, *, prompt: bool = False) -> tuple[str, tuple[Range, ...]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            texts, marked = render_jinja_template(
                [turns],
                chat_template=self._source,
                return_assistant_tokens_mask=self._has_generation_marks,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(role for role, _ in messages)
            raise UserError(
                f"the chat template does not take a conversation of {roles}: {error}; fix the "
                "data or data.instruction.chat_template"
            ) from error
        return texts[0], tuple(marked[0]) if self._has_generation_marks else ()

    def _places(self, messages: Messages, text: str) -> tuple[Range, ...] | None:
        """Return where the contents stand, as they are or stripped; what is around them is known.

        None where the template wrote one otherwise, or something else around it because of it.
        """
        segments = self._skeleton(tuple(role for role, _ in messages)).segments
        places = []
        position = len(segments[0]) if text.startswith(segments[0]) else len(text)
        for (_, content), behind in zip(messages, segments[1:], strict=True):
            variants = (content, content.strip(), content.rstrip(), content.lstrip())
            size = next((len(v) for v in variants if text.startswith(v + behind, position)), None)
            if size is None:
                return None
            places.append((position, position + size))
            position += size + len(behind)
        return tuple(places)

    def _answers_between_prompts(self, messages: Messages, text: str) -> tuple[Range, ...]:
        """Return what stands between the text that asks for an answer and the one that ends with
        it.

        So with templates that rewrite messages, as those do that know of thoughts.
        """
        answers = []
        for index in (i for i, (role, _) in enumerate(messages) if role == ASSISTANT):
            prompt, _ = self._render(messages[:index], prompt=True)
            closed, _ = self._render(messages[: index + 1])
            if not (text.startswith(prompt) and text.startswith(closed)):
                raise UserError(
                    f"the chat template writes message {index + 1} or one before it otherwise when "
                    f"others follow ({messages[index][1][:40]!r}); {_ADVICE}"
                )
            is_last = index + 1 == len(messages)
            tail = self._tail(closed[len(prompt) :], text[len(prompt) :], is_last)
            answers.append((len(prompt), len(prompt) + tail))
        return tuple(answers)

    def _skeleton(self, roles: tuple[str, ...]) -> _Skeleton:
        """Found once for each sequence of roles, by a conversation of stand-ins."""
        if roles not in self._skeletons:
            self._skeletons[roles] = self._find_skeleton(roles)
        return self._skeletons[roles]

    def _find_skeleton(self, roles: tuple[str, ...]) -> _Skeleton:
        stand_ins = [_STAND_IN.format(number) for number in range(len(roles))]
        messages = tuple(zip(roles, stand_ins, strict=True))
        segments = _split(self._render(messages)[0], stand_ins)
        leads, tails = [0] * len(roles), [0] * len(roles)
        if not self._has_generation_marks:
            for index in (i for i, role in enumerate(roles) if role == ASSISTANT):
                prompt, _ = self._render(messages[:index], prompt=True)
                prompt = prompt.rpartition(stand_ins[index - 1])[2]
                if not segments[index].startswith(prompt):
                    raise UserError(
                        "the chat template begins the assistant's turn otherwise when it asks for "
                        f"an answer ({prompt!r}) than when it has one ({segments[index]!r}); "
                        f"{_ADVICE}"
                    )
                leads[index] = len(segments[index]) - len(prompt)
                closed, _ = self._render(messages[: index + 1])
                closed = closed.rpartition(stand_ins[index])[2]
                tails[index] = self._tail(closed, segments[index + 1], index + 1 == len(roles))
        return _Skeleton(segments, tuple(leads), tuple(tails))

    def _tail(self, closed: str, behind: str, is_last: bool) -> int:
        """Return how much behind an answer ends the turn: to its last special token, if it has one.

        The last answer is followed by the end of the document alone, so all is the assistant's.
        """
        if is_last:
            return len(behind)
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(closed, behind, strict=False))
        shared = behind[: sum(1 for _ in pairs)]
        ends = [found.end() for found in self._markers.finditer(shared)]
        return ends[-1] if ends else len(shared)


def _split(text: str, stand_ins: Sequence[str]) -> tuple[str, ...]:
    segments = []
    for number, stand_in in enumerate(stand_ins, 1):
        before, found, text = text.partition(stand_in)
        if not found or stand_in in text:
            count = 1 + text.count(stand_in) if found else 0
            raise UserError(
                f"the chat template writes message {number} of {len(stand_ins)} {count} times "
                "instead of once; give another in data.instruction.chat_template"
            )
        segments.append(before)
    return (*segments, text)


def template_variables(folder: Path) -> dict[str, str]:
    """Return the special tokens that a tokenizer's configuration names, as templates know them."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            found |= read_object(folder / name)
    tokens = {key: value for key, value in found.items() if key.endswith("_token") and value}
    texts = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in tokens.items()
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}
