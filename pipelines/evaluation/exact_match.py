"""Exact match: how many held-out questions a model's greedy answer gets right."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from pipelines.data.reading.instruction import ASSISTANT, USER
from pipelines.evaluation.bootstrap import proportion
from pipelines.evaluation.extracted_answer import extract_answer
from pipelines.evaluation.held_out_documents import conversations
from pipelines.run.verdict import ExactMatch


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
