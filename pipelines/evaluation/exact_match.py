"""Exact match: how many held-out questions a model's greedy answer gets right.

Only the last match of a pattern in an answer counts, such as the number after GSM8K's `####`
(Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021). Numbers are compared as
numbers: `1,000`, `$1000` and `1000.0` are equal.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from pipelines.data.reading.instruction import ASSISTANT, USER
from pipelines.evaluation.bootstrap import proportion
from pipelines.evaluation.held_out_documents import conversations
from pipelines.run.verdict import ExactMatch

_NUMBER = re.compile(r"(-)?(\d*)(?:\.(\d+))?(?<=\d)")  # ends with a digit, so has one


class Question(NamedTuple):
    """What a user asks, and the answer in the data."""

    text: str
    wanted: str  # extracted


class Answer(NamedTuple):
    """A model's answer to a question."""

    question: str
    wanted: str
    text: str
    found: str | None  # extracted; None if the pattern finds nothing
    right: bool


def find_questions(documents: pa.Table, pattern: str, most: int) -> list[Question]:
    """Return the first documents of one question and one answer in which the pattern matches.

    Args:
        documents: A table with text and messages, in random order.
        pattern: A regular expression; its first group counts, or the whole match without a group.
        most: The maximum number of questions.
    """
    found: list[Question] = []
    for messages in conversations(documents):
        if len(found) < most and [role for role, _ in messages] == [USER, ASSISTANT]:
            (_, text), (_, answer) = messages
            wanted = extract_answer(answer, pattern)
            if wanted is not None:
                found.append(Question(text, wanted))
    return found


def answer_questions(
    model_folder: Path, questions: Sequence[Question], pattern: str, max_tokens: int
) -> list[Answer]:
    """Answer each question greedily with the chat template, and compare with the wanted answer."""
    from pipelines.evaluation.generate import generate

    texts = generate(model_folder, [each.text for each in questions], max_tokens, chat=True)
    answers = []
    for question, text in zip(questions, texts, strict=True):
        found = extract_answer(text, pattern)
        answers.append(Answer(*question, text, found, found == question.wanted))
    return answers


def score_answers(answers: Sequence[Answer], confidence: float) -> ExactMatch | None:
    """Return the share of right answers, with an interval whose bounds hold with `confidence`."""
    if not answers:
        return None
    count, right = len(answers), sum(answer.right for answer in answers)
    return ExactMatch(questions=count, right=right, share=proportion(right, count, confidence))


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
