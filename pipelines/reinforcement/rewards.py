"""What an answer is worth: whether it can be checked to be right.

A reward is a function of the prompt, the answer, the wanted answer of the data, and the recipe's
settings; it returns a number, mostly from 0 to 1.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from pipelines.core.errors import UserError
from pipelines.core.extensions import call, load
from pipelines.evaluation.extracted_answer import extract_answer
from pipelines.recipe.reinforcement_section import BUILT_IN_REWARDS, Reinforcement, Reward
from pipelines.reinforcement.sandbox import Limits, passes

_CODE = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)
_Reward = Callable[[str, str, str], float]


def rewards_of(by: Reinforcement) -> dict[str, _Reward]:
    """Return the functions of a recipe's rewards by their names.

    Raises:
        UserError: one is not installed, or refuses its settings.
    """
    return {each.name: _reward(each) for each in by.rewards}


def _reward(wanted: Reward) -> _Reward:
    if wanted.name not in BUILT_IN_REWARDS:
        made = load("rewards", wanted.name)
        return lambda *texts: float(call("rewards", wanted.name, made, *texts, **wanted.settings))
    built_in: dict[str, Any] = {
        "exact_match": exact_match,
        "math": math,
        "python_tests": python_tests,
    }
    reward = partial(built_in[wanted.name], **wanted.settings)
    try:
        reward("", "", "")
    except TypeError as error:
        raise UserError(f"reinforcement.rewards: {wanted.name} refuses: {error}") from error
    return reward


def exact_match(prompt: str, answer: str, wanted: str, pattern: str = r"(?s)\A(.*)") -> float:
    """Return 1 if the pattern finds in the answer what it finds in the wanted one, else 0.

    Its last match counts, of that the first group, and equal numbers are equal: `evaluate`'s
    questions are judged in the same way.
    """
    del prompt
    found = extract_answer(answer, pattern)
    return float(found is not None and found == extract_answer(wanted, pattern))


def math(prompt: str, answer: str, wanted: str) -> float:
    """Return 1 if both end in the same mathematical expression, else 0.

    Raises:
        UserError: the package math-verify is not installed.
    """
    del prompt
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise UserError(
            "reinforcement.rewards: math needs the package math-verify, which is not installed "
            "here; install it wherever Ray's workers run: pip install math-verify[antlr4_9_3]"
        ) from error
    return float(verify(parse(wanted), parse(answer)))


def python_tests(
    prompt: str,
    answer: str,
    wanted: str,
    cpu_seconds: int = 2,
    seconds: float = 10.0,
    memory_mb: int = 256,
) -> float:
    """Return 1 if the answer's code passes the wanted answer, which is Python code too, else 0.

    Code is what stands in the last fence of three backquotes, or the whole text without one.
    """
    del prompt
    limits = Limits(cpu_seconds, seconds, memory_mb * 2**20)
    return float(bool(wanted) and passes(f"{_code(answer)}\n{_code(wanted)}", limits))


def _code(text: str) -> str:
    fenced = _CODE.findall(text)
    return str(fenced[-1]) if fenced else text
