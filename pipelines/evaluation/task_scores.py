"""A model's result on each question of a task, and two models compared question by question.

Both answer the same questions, so what counts is where they differ: the paired bootstrap over
questions gives bounds for the difference of their means. Of answers that are right or wrong it asks
the same as McNemar's test ("Note on the sampling error of the difference between correlated
proportions or percentages", 1947), and it also holds for a metric that is a number.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.errors import UserError
from pipelines.evaluation.bootstrap import overall_ratio
from pipelines.evaluation.exact_match import Answer
from pipelines.recipe.recipe import QUESTIONS, TaskLimit
from pipelines.run.verdict import TaskChange

_SCHEMA = pa.schema([("task", pa.string()), ("question", pa.string()), ("value", pa.float64())])


class TaskRow(NamedTuple):
    """A model's result on one question: more is better, and the task's metric is their mean."""

    task: str  # with its metric, such as `arc_easy/acc`
    question: str
    value: float


def task_table(rows: Iterable[TaskRow]) -> pa.Table:
    """Return the results as a table of task, question and value."""
    return pa.Table.from_pylist([row._asdict() for row in rows], _SCHEMA)


def of_answers(answers: Sequence[Answer]) -> list[TaskRow]:
    """Return the results on held-out questions: 1 for a right answer, 0 for a wrong one."""
    return [TaskRow(QUESTIONS, each.question, float(each.right)) for each in answers]


def check_tasks(found: pa.Table, limits: Sequence[TaskLimit]) -> None:
    """Raise UserError where the recipe limits a task that was not measured."""
    known = pc.unique(found["task"]).to_pylist()
    for limit in limits:
        if limit.task not in known:
            raise UserError(
                f"register.tasks: no {limit.task} was measured; there are: "
                f"{', '.join(sorted(known)) or 'none'}"
            )


def compare_tasks(
    ours: pa.Table, theirs: pa.Table, limits: Sequence[TaskLimit], confidence: float
) -> tuple[TaskChange, ...]:
    """Return how a candidate does on each limited task beside the champion.

    Args:
        ours: The candidate's results.
        theirs: The champion's.
        limits: What the recipe allows.
        confidence: Of each bound.

    Raises:
        ValueError: The two did not answer the same questions.
    """
    changes = []
    for limit in limits:
        mine, other = (_values(each, limit.task) for each in (ours, theirs))
        if mine.keys() != other.keys():
            raise ValueError(f"candidate and champion answered different questions of {limit.task}")
        gains = np.array([mine[question] - other[question] for question in sorted(mine)])
        improvement = overall_ratio(gains, np.ones(len(gains)), confidence)
        changes.append(
            TaskChange(
                task=limit.task,
                questions=len(gains),
                candidate=float(np.mean(list(mine.values()))),
                champion=float(np.mean(list(other.values()))),
                improvement=improvement,
                better_on=int((gains > 0).sum()),
                worse_on=int((gains < 0).sum()),
                regressed=improvement.upper is not None and improvement.upper < -limit.max_loss,
            )
        )
    return tuple(changes)


def _values(found: pa.Table, task: str) -> dict[str, float]:
    rows = found.filter(pc.field("task") == task)
    return dict(zip(rows["question"].to_pylist(), rows["value"].to_pylist(), strict=True))
