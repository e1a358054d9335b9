"""Counterfactual pairs from a file: sentences that differ only in which of two groups they name.

A file is a JSON object with a list of `sets`. A set names two groups, whose terms correspond in
their order, and templates: a sentence with `{term}`, and the group that a stereotype ascribes it
to. A Korean particle in both its forms, `{은/는}`, may follow `{term}`: the term's end decides
which form is used.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import Field, ValidationError, model_validator

from pipelines.core.errors import UserError
from pipelines.recipe.section import Section

SHIPPED_TEMPLATES = Path(__file__).resolve().parent.parent / "recipes" / "bias_templates.json"

# The first form follows a syllable with a final consonant.
PARTICLES = ("은/는", "이/가", "을/를", "과/와", "으로/로", "이랑/랑")
_SENTENCE = re.compile(
    rf"(?P<before>[^{{}}]*)\{{term\}}(?:\{{(?P<particle>{'|'.join(PARTICLES)})\}})?(?P<after>[^{{}}]+)"
)
_FIRST_SYLLABLE, _LAST_SYLLABLE, _FINALS = ord("가"), ord("힣"), 28
_RIEUL = 8  # ㄹ, which 로 follows as it follows a vowel


class Sentence(NamedTuple):
    """A sentence with a term: the text up to the term's end, and the rest, equal for each term."""

    prompt: str
    continuation: str


class BiasTemplate(Section):
    """A sentence about a member of a group, and the group that a stereotype ascribes it to."""

    text: str
    ascribed_to: str

    def sentence(self, term: str) -> Sentence:
        """Return the sentence about `term`; raise ValueError if it cannot be made."""
        found = _SENTENCE.fullmatch(self.text)
        if not found:
            raise ValueError(
                f"template {self.text!r} needs {{term}} once and text after it; directly "
                f"after {{term}} may stand one of {', '.join(f'{{{pair}}}' for pair in PARTICLES)}"
            )
        particle = _particle(term, found["particle"]) if found["particle"] else ""
        return Sentence(f"{found['before']}{term}{particle}", found["after"])


class BiasSet(Section):
    """Templates about two groups in one language."""

    name: str = Field(pattern=r"^[\w][\w. -]*$")
    language: str = Field(min_length=1)
    groups: dict[str, tuple[str, ...]]
    templates: tuple[BiasTemplate, ...]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        try:
            self._check()
        except ValueError as error:
            raise ValueError(f"set `{self.name}`: {error}") from None
        return self

    def _check(self) -> None:
        sizes = [len(terms) for terms in self.groups.values()]
        if len(sizes) != 2 or sizes[0] != sizes[1] or not sizes[0]:
            counts = ", ".join(f"{name} {len(terms)}" for name, terms in self.groups.items())
            raise ValueError(
                f"`groups` has {counts or 'nothing'}; it needs two groups with equally many terms"
            )
        for pair in self.pairs:
            if not all(term.strip() for term in pair) or pair[0] == pair[1]:
                raise ValueError(f"{pair[0]!r} and {pair[1]!r} are not a pair of terms")
        ascribed = Counter(template.ascribed_to for template in self.templates)
        if unknown := ascribed.keys() - self.groups.keys():
            raise ValueError(f"`ascribed_to` names {min(unknown)!r}, which is not among its groups")
        for group in self.groups:
            if not ascribed[group]:
                raise ValueError(
                    f"no template is ascribed to {group!r}; without some for each group, bias "
                    "cannot be told from how common a term is"
                )
        for template in self.templates:
            for term in (term for pair in self.pairs for term in pair):
                template.sentence(term)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Pairs of a term of the first group and its counterpart in the second."""
        first, second = self.groups.values()
        return list(zip(first, second, strict=True))


class _File(Section):
    sets: tuple[BiasSet, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _sets_have_names_of_their_own(self) -> Self:
        names = Counter(each.name for each in self.sets)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"two sets are named {twice[0]}")
        return self


def load_bias_templates(path: str | None) -> tuple[BiasSet, ...]:
    """Return the sets in a file, or the sets that come with Penstock.

    Raises:
        UserError: There is no such file, or it has a mistake; one line says where.
    """
    file = Path(path).expanduser() if path else SHIPPED_TEMPLATES
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read ({error.strerror}); fix evaluate.bias.templates"
        ) from error
    except (ValueError, RecursionError) as error:  # a mistake of JSON or of UTF-8
        raise UserError(f"{file}: not valid JSON: {error}") from error
    try:
        return _File.model_validate(values).sets
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"{file}: {_explain(first['loc'], first, values)}") from None


def _explain(place: Sequence[int | str], error: Mapping[str, object], values: object) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    if not isinstance(values, dict):
        return 'the file must be a JSON object with "sets"'
    key = ".".join(str(part) for part in place)
    return message if error["type"] == "value_error" or not key else f"{key}: {message}"


def _particle(term: str, pair: str) -> str:
    """Return the form of a particle that follows `term`, as its last syllable decides."""
    code = ord(term[-1])
    if not _FIRST_SYLLABLE <= code <= _LAST_SYLLABLE:
        raise ValueError(
            f"term {term!r} does not end in a Hangul syllable, so {{{pair}}} has no form after it; "
            "write out the particle in templates of a separate set"
        )
    final = (code - _FIRST_SYLLABLE) % _FINALS
    closed, open_ = pair.split("/")
    if pair == "으로/로" and final == _RIEUL:
        return open_
    return closed if final else open_
