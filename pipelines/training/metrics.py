"""What a run tells of itself as it trains."""

from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class StepMetrics:
    """One point of the training curves."""

    step: int  # optimizer steps done
    tokens: int  # seen so far, over all processes
    loss: float  # nats a token in this step, over all processes
    learning_rate: float
    gradient_norm: float  # before clipping
    step_seconds: float
    tokens_per_second: float  # over all processes

    last: bool  # of this run

    def curve_point(self) -> dict[str, float]:
        """What depends on recipe and data alone, and not on the machine's speed."""
        timing = ("step_seconds", "tokens_per_second", "last")
        return {key: value for key, value in asdict(self).items() if key not in timing}

    def curves(self) -> dict[str, float]:
        """All figures under the names that MLflow shows."""
        return {
            f"train/{key}": value
            for key, value in asdict(self).items()
            if key not in ("step", "last")
        }


Report = Callable[[StepMetrics], None]
"""Called on every process alike, so it may be a barrier."""
