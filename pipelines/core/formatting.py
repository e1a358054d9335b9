"""Figures as a page shows them: as many digits as mean something, and words where there is none."""

import math

UNKNOWN = "\N{EN DASH}"
NO_NUMBER = "not a number"
MINUS = "\N{MINUS SIGN}"  # as wide as a plus, and never broken from its figure
_ROUNDS_TO_ONE = 0.9995  # in three digits: 999.7 kB is 1 MB and not 1e+03 kB


def decimals(value: float | None, digits: int = 4) -> str:
    """`1.2346`; `not a number` of nan and the infinities, a dash where it is not known."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return NO_NUMBER
    return f"{value:,.{digits}f}".replace("-", MINUS)


def signed(value: float | None, digits: int = 4) -> str:
    """Likewise, with a plus before what is more than nothing."""
    text = decimals(value, digits)
    return f"+{text}" if value is not None and math.isfinite(value) and value > 0 else text


def interval(
    lower: float | None, upper: float | None, digits: int = 4, *, sign: bool = False
) -> str:
    """`2.0310 to 2.2140`; empty where a bound is missing."""
    if lower is None or upper is None:
        return ""
    form = signed if sign else decimals
    return f"{form(lower, digits)} to {form(upper, digits)}"


def short(count: float | None) -> str:
    """`1.2M`: for numbers whose size matters and whose digits do not."""
    if count is None:
        return UNKNOWN
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= _ROUNDS_TO_ONE * unit:
            return f"{amount(count / unit)}{name}"
    return amount(count)


def size(count: float | None) -> str:
    """`1.29 MB`, in powers of a thousand."""
    if count is None:
        return UNKNOWN
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= _ROUNDS_TO_ONE * unit:
            return f"{amount(count / unit)} {name}"
    return f"{count:.0f} bytes"


def duration(seconds: float | None) -> str:
    """`45 s`, `12 min`, `3.4 h`, `8.1 days`."""
    if seconds is None:
        return UNKNOWN
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{amount(seconds / unit)} {name}"
    return f"{seconds:.3g} s"


def amount(value: float | None) -> str:
    """Write three digits, and all before the point: `12,345`, `3.14`, `0.00123`."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def baseline_label(name: str) -> str:
    """A baseline's name in a record, for a user: `ngram-2` is `byte n-gram, order 2`."""
    if name.startswith("ngram-"):
        return f"byte n-gram, order {name.removeprefix('ngram-')}"
    return {"xz": "xz -9e, all together", "xz-per-document": "xz -9e, each document"}[name]


def percent(value: float | None, of: float) -> float | None:
    """None of what is not known."""
    return None if value is None else 100 * value / of


def significant(value: object) -> object:
    """A JSON-able value whose floats have six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: significant(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [significant(each) for each in value]
    return value
