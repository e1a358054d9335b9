"""Penstock's checkpoints: copied and written beside training."""

import time
from pathlib import Path
from typing import Any

from pipelines.training.checkpoint.checkpointer import Checkpoints, Position
from pipelines.training.checkpoint.store import CheckpointStore
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.small_training import Training

_STEPS_AFTER = 3  # beside which the write may go on


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    training = Training(options)
    store = CheckpointStore(folder / "ours")
    checkpoints = Checkpoints(store, training.model, training.optimizer, keep=1)
    saves = 0

    def run_round() -> tuple[float, dict[str, Any]]:
        nonlocal saves
        saves += 1
        alone = training.step()
        began = time.perf_counter()
        checkpoints.save(Position(saves))
        stalled = time.perf_counter() - began

        def before_update() -> None:
            nonlocal stalled
            began = time.perf_counter()
            checkpoints.before_update()
            stalled += time.perf_counter() - began

        beside = [training.step(before_update) for _ in range(_STEPS_AFTER)]
        checkpoints.wait()  # a round's write is not the next one's stall
        assert store.steps() == [saves]
        return 1, {
            "seconds": stalled,
            "stall_seconds": stalled,
            "step_seconds": alone,
            "steps_beside_seconds": beside,
            "state_bytes": training.state_bytes,
        }

    return run_round


if __name__ == "__main__":
    serve(prepare)
