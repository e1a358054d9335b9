"""The part of a recipe that says which documents may be trained on, and what is masked in them."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipelines.recipe.section import Extension, Section, refuse_secret

Share = Annotated[float, Field(ge=0, le=1)]
PiiKind = Literal["secret", "email", "card", "us_ssn", "kr_rrn", "ip", "phone"]


class _Filter(Section):
    """A filter, which does nothing until it is enabled."""

    enabled: bool = False


class LanguageFilter(_Filter):
    """Drops documents in other languages, and those whose language is uncertain."""

    keep: tuple[str, ...] = Field(
        ("en",), min_length=1, description="ISO 639 codes, as fastText's lid.176 gives them"
    )
    min_confidence: Share = Field(0.65, description="The detector's confidence, from 0 to 1")


class LengthFilter(_Filter):
    """Drops documents that are too short or too long."""

    min_characters: int = Field(100, ge=0)
    max_characters: int = Field(1_000_000, ge=1)

    @model_validator(mode="after")
    def _range_ascends(self) -> Self:
        if self.min_characters > self.max_characters:
            raise ValueError(
                f"min_characters({self.min_characters}) is above "
                f"max_characters({self.max_characters}): no document would be kept"
            )
        return self


class CharacterSetFilter(_Filter):
    """Drops documents in foreign scripts, and wrongly decoded documents."""

    scripts: tuple[str, ...] = Field(
        (), description="Unicode scripts that letters may have, such as Latin; empty: any"
    )
    min_letters_in_scripts: Share = Field(0.9, description="Share of the letters")
    max_replacement: Share = Field(0.001, description="Share of the characters that are U+FFFD")
    max_control: Share = Field(
        0.001, description="Share that are control, private-use or unassigned characters"
    )
    max_mojibake: Share = Field(0.01, description="Share that are UTF-8 read as Latin-1")


class SymbolRatioFilter(_Filter):
    """Drops documents with many symbols: not letters, digits, spaces or common punctuation."""

    max_symbols_per_word: float = Field(0.5, ge=0)
    max_symbol_characters: Share = Field(0.1, description="Share of the characters")


class GopherQualityFilter(_Filter):
    """Rae et al. 2021, section A.1.1, "quality filtering"; English only."""

    min_words: int = Field(50, ge=1)
    max_words: int = Field(100_000, ge=1)
    min_mean_word_length: float = Field(3, ge=0)
    max_mean_word_length: float = Field(10, ge=0)
    max_symbols_per_word: float = Field(0.1, ge=0, description="For # and for ellipses separately")
    max_bullet_lines: Share = 0.9
    max_ellipsis_lines: Share = 0.3
    min_alphabetic_words: Share = Field(0.8, description="Share of the words with a letter")
    min_stop_words: int = Field(
        2, ge=0, le=8, description="How many different words of: the be to of and that have with"
    )


class GopherRepetitionFilter(_Filter):
    """Rae et al. 2021, table A1: how much of a document may repeat itself."""

    max_duplicate_lines: Share = 0.30
    max_duplicate_paragraphs: Share = 0.30
    max_duplicate_line_characters: Share = 0.20
    max_duplicate_paragraph_characters: Share = 0.20
    max_top_ngram: tuple[Share, Share, Share] = Field(
        (0.20, 0.18, 0.16), description="Characters in the most frequent 2-, 3- and 4-gram"
    )
    max_duplicate_ngrams: tuple[Share, Share, Share, Share, Share, Share] = Field(
        (0.15, 0.14, 0.13, 0.12, 0.11, 0.10),
        description="Characters in repeated 5-, 6-, 7-, 8-, 9- and 10-grams",
    )


class C4Filter(_Filter):
    """Raffel et al. 2020, section 2.2; English only.

    C4 also drops single lines. Here a document is never changed: it is dropped if too little of
    it would be left.
    """

    min_sentences: int = Field(5, ge=0, description="In the lines that C4 would keep")
    min_kept_characters: Share = Field(
        0.5, description="Share of the characters that lie in lines C4 would keep"
    )
    min_words_per_line: int = Field(3, ge=0, description="In a line that C4 would keep")
    max_word_length: int = Field(1000, ge=1, description="In a line that C4 would keep")


class Filters(Section):
    """The filters that drop documents for their content, in this order; each is off by default."""

    length: LengthFilter = LengthFilter()
    language: LanguageFilter = LanguageFilter()
    character_set: CharacterSetFilter = CharacterSetFilter()
    symbol_ratio: SymbolRatioFilter = SymbolRatioFilter()
    gopher_quality: GopherQualityFilter = GopherQualityFilter()
    c4: C4Filter = C4Filter()
    gopher_repetition: GopherRepetitionFilter = GopherRepetitionFilter()
    extensions: tuple[Extension, ...] = Field((), description="Filters of packages of your own")


class Pii(Section):
    """The handling of personal data and secrets."""

    action: Literal["off", "report", "mask", "drop"] = Field(
        "off",
        description="report counts them; mask inserts <EMAIL> or the like; drop drops documents",
    )
    kinds: tuple[PiiKind, ...] = Field(
        ("secret", "email", "card", "us_ssn", "kr_rrn", "ip", "phone"),
        min_length=1,
        description="What to look for",
    )
    phone_region: str = Field(
        "US",
        pattern="^[A-Z]{2}$",
        description="Country of phone numbers without +",
    )


class Decontamination(Section):
    """Evaluation sets whose text must not be trained on."""

    against: tuple[str, ...] = Field(
        (), description="Files, folders, globs or URLs of evaluation text; empty: none"
    )
    ngram: int = Field(13, ge=5, description="Words in a row that count as the same text")
    min_shared: int = Field(1, ge=1, description="This many shared n-grams drop a document")

    @model_validator(mode="after")
    def _paths_hold_no_secret(self) -> Self:
        for path in self.against:
            refuse_secret(path, "data.decontamination.against")
        return self


class Dedup(Section):
    """Which documents count as equal; the first in source order is kept."""

    kind: Literal["exact", "minhash"] = Field(
        "exact", description="exact: the same text; minhash: also nearly the same"
    )
    ngram: int = Field(5, ge=1, description="Words per shingle")
    permutations: int = Field(128, ge=16, le=1024, description="Values per MinHash signature")
    jaccard: float = Field(0.8, gt=0, lt=1, description="Similarity that makes two equal")
