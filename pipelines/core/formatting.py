"""Numbers as a report shows them: only the digits that matter, and words for missing values."""

import math
import sys

UNKNOWN = "\N{EN DASH}"
NO_NUMBER = "not a number"
MINUS = "\N{MINUS SIGN}"  # as wide as a plus; no line breaks between it and its number
_ROUNDS_TO_ONE = 0.9995  # with three digits, 999.7 kB is 1 MB and not 1e+03 kB


def decimals(value: float | None, digits: int = 4) -> str:
    """Format as `1.2346`; as `not a number` for nan and infinities, and as a dash for None."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return NO_NUMBER
    return f"{value:,.{digits}f}".replace("-", MINUS)


def signed(value: float | None, digits: int = 4) -> str:
    """Format like `decimals`, with a plus before positive values."""
    text = decimals(value, digits)
    return f"+{text}" if value is not None and math.isfinite(value) and value > 0 else text


def interval(
    lower: float | None, upper: float | None, digits: int = 4, *, sign: bool = False
) -> str:
    """Format as `2.0310 to 2.2140`; return an empty string if a bound is missing."""
    if lower is None or upper is None:
        return ""
    form = signed if sign else decimals
    return f"{form(lower, digits)} to {form(upper, digits)}"


def short(count: float | None) -> str:
    """Format as `1.2M`, for numbers of which only the order of magnitude matters."""
    if count is None:
        return UNKNOWN
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= _ROUNDS_TO_ONE * unit:
            return f"{amount(count / unit)}{name}"
    return amount(count)


def size(count: float | None) -> str:
    """Format a number of bytes as `1.29 MB`, in powers of a thousand."""
    if count is None:
        return UNKNOWN
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= _ROUNDS_TO_ONE * unit:
            return f"{amount(count / unit)} {name}"
    return f"{count:.0f} bytes"


def duration(seconds: float | None) -> str:
    """Format as `45 s`, `12 min`, `3.4 h` or `8.1 days`."""
    if seconds is None:
        return UNKNOWN
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{amount(seconds / unit)} {name}"
    return f"{seconds:.3g} s"


def amount(value: float | None) -> str:
    """Format with three digits, and more before the point: `12,345`, `3.14`, `0.00123`."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def probability(value: float) -> str:
    """Format a probability with four digits, and near 1 with two of what is missing: `0.999949`."""
    missing = max(1 - value, sys.float_info.epsilon)
    return f"{value:.{max(4, 1 - math.floor(math.log10(missing)))}f}".rstrip("0").rstrip(".")


def baseline_label(name: str) -> str:
    """Return a record's baseline name as users see it: `ngram-2` is `byte n-gram, order 2`."""
    if name.startswith("ngram-"):
        return f"byte n-gram, order {name.removeprefix('ngram-')}"
    return {"xz": "xz -9e, all together", "xz-per-document": "xz -9e, each document"}[name]


def percent(value: float | None, of: float) -> float | None:
    """Return `value` as a percentage of `of`, or None if `value` is None."""
    return None if value is None else 100 * value / of


def significant(value: object) -> object:
    """Return a JSON-able value whose floats have six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: significant(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [significant(each) for each in value]
    return value
