"""One value of one metric, as MLflow keeps it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A value at a step and a time."""

    key: str
    value: float
    milliseconds: int  # since 1970
    step: int


def points_now(metrics: Mapping[str, float], step: int) -> list[Point]:
    """A point of each metric."""
    now = int(time.time() * 1000)
    return [Point(allowed_name(key), float(value), now, step) for key, value in metrics.items()]


def allowed_name(key: str) -> str:
    """A dataset version in it as `name:N`: MLflow allows no `@` in a metric's or param's name."""
    return key.replace("@", ":")
