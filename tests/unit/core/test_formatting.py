"""Figures as a user reads them, at the edges where a unit or a sign changes."""

import math

import pytest

from pipelines.core.formatting import (
    decimals,
    duration,
    interval,
    probability,
    short,
    signed,
    size,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_700, "1 MB"),
        (1_288_681, "1.29 MB"),
        (999_700_000_000, "1 TB"),
        (1_234_000_000_000_000, "1,234 TB"),
    ],
)
def test_a_size_has_three_digits_and_a_unit(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999"), (999_600, "1M"), (1_234_567, "1.23M"), (7e12, "7T")]
)
def test_a_count_is_short(count: float, text: str) -> None:
    assert short(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0.5 s"), (119.6, "120 s"), (7200, "2 h"), (1e9, "11,574 days")]
)
def test_a_duration_is_in_the_unit_that_a_user_would_choose(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_what_is_no_number_or_not_known_is_said_in_words() -> None:
    assert decimals(math.nan) == signed(-math.inf) == "not a number"
    assert size(None) == short(None) == duration(None) == decimals(None) == "\N{EN DASH}"
    assert interval(None, 1.0) == ""


def test_a_sign_is_as_wide_as_the_other() -> None:
    assert interval(-0.5, 0.25, 2, sign=True) == "\N{MINUS SIGN}0.50 to +0.25"
    assert signed(0.0, 1) == "0.0"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5"),
        (0.95, "0.95"),
        (0.98086, "0.9809"),
        (0.9987, "0.9987"),
        (0.999948956, "0.999949"),
        (1 - 3.2e-9, "0.9999999968"),
        (1.0, "1"),
    ],
)
def test_a_probability_near_one_keeps_what_is_missing(value, text):
    assert probability(value) == text
