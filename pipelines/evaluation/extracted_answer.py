"""What of a text is its answer, for whoever compares it with the wanted one.

Only the last match of a pattern counts, such as the number after GSM8K's `####` (Cobbe et al.,
"Training Verifiers to Solve Math Word Problems", 2021). Numbers are compared as numbers: `1,000`,
`$1000` and `1000.0` are equal.
"""

import re

_NUMBER = re.compile(r"(-)?(\d*)(?:\.(\d+))?(?<=\d)")  # ends with a digit, so has one


def extract_answer(text: str, pattern: str) -> str | None:
    """Return the pattern's last match, or None; equal numbers are returned as equal strings."""
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    last = matches[-1]
    found = (last[1] if last.re.groups else last[0]) or ""
    return _canonical(found.strip())


def _canonical(answer: str) -> str:
    """Return a number in one standard spelling; any other text is returned unchanged."""
    number = _NUMBER.fullmatch(re.sub("[$€₩%,]", "", answer).strip().rstrip("."))
    if not number:
        return answer
    sign, whole, fraction = number.groups(default="")
    digits = ".".join(filter(None, (whole.lstrip("0") or "0", fraction.rstrip("0"))))
    return digits if digits == "0" else sign + digits
