import socket
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.core.errors import UserError
from pipelines.data.cleaning.filter_rules import C4
from pipelines.data.cleaning.filters import (
    GopherQuality,
    GopherRepetition,
    build_filters,
    first_rejection,
)
from pipelines.data.cleaning.text_statistics import TextStatistics
from pipelines.recipe.cleaning_section import (
    Filters,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from tests.unit.data.cleaning.korean_text import korean_documents

NAMES = [name for name in Filters.model_fields if name != "extensions"]

PROSE = """\
The lighthouse at the end of the harbour has not been lit for almost forty years, but people in \
the village still set their clocks by it. Every evening, when the sun goes down behind the ridge, \
its shadow reaches the door of the old bakery, and that is how the baker knows it is time to close.

"I have never owned a watch," she told me when I asked her about it. "Why would I? The tower has \
always been there, and it has never been late." Her grandfather was the last keeper, and she \
remembers climbing the stairs with him, counting the steps out loud until she ran out of numbers.

When the lamp was finally replaced with a small automatic light on the breakwater, the council \
wanted to pull the building down. Nobody could agree on who should pay for the work, however, and \
so it stayed. Today a family of swifts nests under the gallery, and in the summer visitors come \
with cameras to look at the view. The stairs are closed for repairs, as they have been since the \
spring, but nobody seems to mind.
"""
WRAPPED = """\
This document describes how the program reads its configuration and what it does when a
value is missing. It is written for people who run the program on their own machines, and
it assumes that you have used a command line before.

The configuration is read once, when the program starts. If a file of that name exists in
the current directory, it is used; otherwise the one in your home directory is read, and if
there is none, the defaults apply. A value that is given on the command line always wins
over the one in a file.

You are free to copy and change this document, provided that the notice above is kept in
all copies. The authors accept no liability for any damage that may arise from its use, and
they make no promise that the program is fit for a particular purpose. If you find that
something described here does not work, please tell us about it, and we will try to help.
"""
MENU = "\n".join(
    ["Home", "About us", "Our products", "Contact", "Careers", "Log in", "Shopping cart"] * 3
    + [f"Category number {n} of the many things that we have to sell to you" for n in range(20)]
)
NUMBERS = "\n".join(f"{n} {n * n} {n**3} {n * 7919 % 1009}" for n in range(1, 60))


def filters(*names, **limits):
    sections = {name: {"enabled": True} for name in names}
    for name, values in limits.items():
        sections[name] = {"enabled": True, **values}
    return build_filters(Filters.model_validate(sections))


def test_no_filter_is_on_by_default():
    assert build_filters(Filters()) == []


def test_each_section_builds_the_filter_of_its_name():
    for name in NAMES:
        assert [built.name for built in filters(name)] == [name]
    assert {built.name for built in filters(*NAMES)} == set(NAMES)


@pytest.mark.parametrize("text", [PROSE, WRAPPED], ids=["paragraphs", "wrapped"])
def test_good_english_passes_every_filter(text):
    assert first_rejection(filters(*NAMES), text) is None


def test_clean_korean_passes_with_every_filter_on():
    documents = korean_documents(300)
    assert len(set(documents)) == 300
    enabled = filters(*NAMES, language={"keep": ["ko"]}, character_set={"scripts": ["Hangul"]})
    rejected = Counter(first_rejection(enabled, text) for text in documents)
    assert rejected[None] > 0.95 * len(documents), rejected


def test_without_the_language_rule_english_rules_would_discard_all_korean():
    quality = GopherQuality(GopherQualityFilter())
    rules = Counter(quality.reject(TextStatistics(text)) for text in korean_documents(100))
    assert None not in rules
    assert not any(quality.holds_for(TextStatistics(text)) for text in korean_documents(100))


JUNK = {
    "length:too_short": "Click here.",
    "character_set:mojibake": "Le cafÃ© Ã©tait fermÃ©, mais la boulangÃ¨re Ã©tait lÃ . " * 4,
    "character_set:replacement_characters": PROSE.replace("e", "\ufffd"),
    "character_set:control_characters": PROSE.replace(" a ", " \x07 "),
    "symbol_ratio:too_many_symbols": "=+=+=+ <<<>>> ~~~ ||| $$$ ^^^ " * 12,
    "symbol_ratio:too_many_symbols_per_word": "temperature=measurements pressure+temperature " * 12,
    "language:fr": "Le vieux phare ne s'allume plus depuis quarante ans, mais les habitants du "
    "village règlent encore leurs montres sur son ombre. Chaque soir, elle touche la porte.",
    "gopher_quality:too_few_words": PROSE[:200],
    "gopher_quality:too_many_hashes": PROSE.replace(". ", ". # # # # # # ").replace(", ", " # # "),
    "gopher_quality:too_many_ellipses": PROSE.replace(". ", "... ")
    .replace(",", "...")
    .replace(" the ", " the... "),
    "gopher_quality:too_many_bullet_lines": "\n".join(
        f"- {line}" for line in PROSE.replace(". ", ".\n").splitlines() if line
    ),
    "gopher_quality:too_few_alphabetic_words": "From 1905 through 1998 they counted 1240 of "
    "the 4077 houses, with 8193 others between 9514 and 9915. " * 9,
    "c4:lorem_ipsum": PROSE + "Lorem ipsum dolor sit amet.",
    "c4:curly_bracket": PROSE + "function main() { return the value; }",
    "c4:no_terminal_punctuation": MENU,
    "c4:policy": "\n".join(
        f"By reading page {n} of this site you agree to our privacy policy and to the rest."
        for n in range(12)
    ),
    "c4:javascript": "\n".join(
        f"Please enable Javascript in your browser to see the part number {n} of that page."
        for n in range(12)
    ),
    "c4:short_lines": "\n".join(["Read more."] * 20 + [PROSE[:90].strip() + "."]),
    "gopher_repetition:duplicate_lines": "The same line comes again and again.\n" * 12,
    "gopher_repetition:duplicate_paragraphs": "Read more.\n\n" * 3 + PROSE.replace(". ", ".\n"),
}


@pytest.mark.parametrize("reason", JUNK)
def test_junk_is_rejected_with_its_reason(reason):
    name = reason.partition(":")[0]
    assert first_rejection(filters(name), JUNK[reason]) == reason


@pytest.mark.parametrize("text", [MENU, NUMBERS, "asdf qwer zxcv " * 40], ids=str.split)
def test_typical_junk_does_not_pass(text):
    assert first_rejection(filters(*NAMES), text)


class TestLanguage:
    def test_another_language_than_english_is_not_shown_to_english_filters(self):
        french = JUNK["language:fr"]
        assert first_rejection(filters("gopher_quality", "c4"), french) is None

    def test_what_is_no_language_is_uncertain(self):
        assert first_rejection(filters("language"), NUMBERS) == "language:uncertain"

    def test_a_list_of_languages_is_kept(self):
        both = filters(language={"keep": ["en", "ko"]})
        assert first_rejection(both, PROSE) is None
        assert first_rejection(both, korean_documents(1)[0]) is None


class TestGopherRepetition:
    def rule(self, text, **limits):
        loose = dict.fromkeys(GopherRepetitionFilter.model_fields, 1.0)
        loose |= {"enabled": True, "max_top_ngram": (1,) * 3, "max_duplicate_ngrams": (1,) * 6}
        section = GopherRepetitionFilter.model_validate(loose | limits)
        return GopherRepetition(section).reject(TextStatistics(text))

    # a b and a b again: of 10 characters, 4 lie in the top 2-gram.
    @pytest.mark.parametrize(("limit", "rule"), [(0.39, "top_2_gram"), (0.41, None)])
    def test_the_most_frequent_ngram_by_hand(self, limit, rule):
        assert self.rule("a b c d a b e f g h", max_top_ngram=(limit, 1, 1)) == rule

    # Of 14 characters, the later "a b c d e f" holds 6: two 5-grams that overlap.
    @pytest.mark.parametrize(("limit", "rule"), [(0.42, "duplicate_5_grams"), (0.43, None)])
    def test_characters_in_overlapping_duplicates_count_once(self, limit, rule):
        text = "a b c d e f x y a b c d e f"
        limits = (limit, 1, 1, 1, 1, 1)
        assert self.rule(text, max_duplicate_ngrams=limits) == rule

    def test_a_longer_duplicate_is_found_behind_lax_limits_for_shorter_ones(self):
        words = [f"w{n}" for n in range(30)]
        text = " ".join(words + words[:12])
        assert self.rule(text, max_duplicate_ngrams=(1, 1, 1, 1, 1, 0.2)) == "duplicate_10_grams"

    def test_an_ngram_that_comes_once_is_no_repetition(self):
        assert self.rule("just four words here", max_top_ngram=(0, 0, 0)) is None

    @given(st.lists(st.sampled_from("abc"), max_size=60), st.integers(0, 5))
    def test_duplicates_as_plain_python_counts_them(self, words, index):
        n = 5 + index
        seen, covered = set(), set()
        for start in range(len(words) - n + 1):
            ngram = tuple(words[start : start + n])
            if ngram in seen:
                covered |= set(range(start, start + n))
            seen.add(ngram)
        share = len(covered) / max(1, len(words))
        limits = [1.0] * 6
        limits[index] = max(0.0, share - 1e-9)
        rule = f"duplicate_{n}_grams" if covered else None
        assert self.rule(" ".join(words), max_duplicate_ngrams=limits) == rule
        limits[index] = share
        assert self.rule(" ".join(words), max_duplicate_ngrams=limits) is None

    @given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=60), st.integers(0, 2))
    def test_the_top_ngram_as_plain_python_counts_it(self, words, index):
        n = 2 + index
        ngrams = Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))
        most = max(ngrams.values(), default=0)
        share = min(1.0, most * n / len(words)) if most > 1 else 0.0
        limits = [1.0] * 3
        limits[index] = max(0.0, share - 1e-9)
        rule = f"top_{n}_gram" if share else None
        assert self.rule(" ".join(words), max_top_ngram=limits) == rule


class TestCharacterSet:
    def test_other_scripts(self):
        latin = filters(character_set={"scripts": ["Latin"]})
        assert first_rejection(latin, PROSE) is None
        assert first_rejection(latin, PROSE + "안녕하세요. ") is None
        assert first_rejection(latin, korean_documents(1)[0]) == "character_set:other_scripts"

    def test_a_script_that_there_is_not(self):
        with pytest.raises(UserError, match="no script 'Klingon'"):
            filters(character_set={"scripts": ["Klingon"]})

    def test_accents_quotes_and_emoji_are_no_mojibake(self):
        text = (
            "Ça va « très bien », señor… “naïve” café \N{EN DASH} ÉTÉ À LYON. Größe, Ærø, Łódź. 👍 "
            * 4
        )
        assert first_rejection(filters("character_set"), text) is None


class TestC4:
    def test_lines_that_c4_drops_are_left_out_of_account(self):
        page = "Home\nAbout\nLog in\n\n" + PROSE
        assert first_rejection(filters("c4"), page) is None

    def test_too_few_sentences(self):
        text = "The first sentence is here. The second one follows. That was the last of them."
        assert C4(Filters().c4).reject(TextStatistics(text)) == "too_few_sentences"


@given(st.text())
def test_any_text_is_kept_or_has_a_reason(text):
    reason = first_rejection(filters(*NAMES, length={"min_characters": 0}), text)
    assert reason is None or reason.partition(":")[0] in NAMES


@given(st.text(alphabet="ab .\n#{é한", max_size=300))
def test_no_filter_depends_on_the_others(text):
    for name in NAMES:
        alone = first_rejection(filters(name), text)
        assert alone is None or alone.startswith(f"{name}:")


def test_nothing_is_downloaded(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    from pipelines.data.cleaning import text_statistics

    text_statistics._detector.cache_clear()
    assert text_statistics.detect_language(PROSE).code == "en"
