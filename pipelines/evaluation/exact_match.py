"""Of how many held-out questions a model's greedy answer comes out right.

What counts of an answer is what a pattern finds last in it, as the number behind GSM8K's `####`
(Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021). Numbers are compared as
numbers: `1,000`, `$1000` and `1000.0` are one.
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
    """What a user asks and the answer that the data have."""

    text: str
    wanted: str  # extracted


class Answer(NamedTuple):
    """What a model made of a question."""

    question: str
    wanted: str
    text: str
    found: str | None  # extracted; None where the pattern finds nothing
    right: bool


def find_questions(documents: pa.Table, pattern: str, most: int) -> list[Question]:
    """The first documents that are one question and an answer in which the pattern finds something.

    Args:
        documents: With text and messages, in an order that is a random one.
        pattern: A regular expression; its first group counts, or all of it.
        most: Questions at most.
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
    """Answer each question greedily, by the chat template, and compare."""
    from pipelines.evaluation.generate import generate

    texts = generate(model_folder, [each.text for each in questions], max_tokens, chat=True)
    answers = []
    for question, text in zip(questions, texts, strict=True):
        found = extract_answer(text, pattern)
        answers.append(Answer(*question, text, found, found == question.wanted))
    return answers


def score_answers(answers: Sequence[Answer], confidence: float) -> ExactMatch | None:
    """The share of right answers; each bound of its interval holds with this confidence."""
    if not answers:
        return None
    count, right = len(answers), sum(answer.right for answer in answers)
    return ExactMatch(questions=count, right=right, share=proportion(right, count, confidence))


def extract_answer(text: str, pattern: str) -> str | None:
    """What the pattern finds last, in a form in which equal numbers are equal; None for nothing."""
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    last = matches[-1]
    found = (last[1] if last.re.groups else last[0]) or ""
    return _canonical(found.strip())


def _canonical(answer: str) -> str:
    """A number without what is only its spelling; any other text as it is."""
    number = _NUMBER.fullmatch(re.sub("[$€₩%,]", "", answer).strip().rstrip("."))
    if not number:
        return answer
    sign, whole, fraction = number.groups(default="")
    digits = ".".join(filter(None, (whole.lstrip("0") or "0", fraction.rstrip("0"))))
    return digits if digits == "0" else sign + digits
