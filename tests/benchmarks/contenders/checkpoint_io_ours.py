"""A whole checkpoint restored by one of our readers, or saved and waited for."""

import shutil
from pathlib import Path
from typing import Any

from pipelines.loading.sources.gpu_readers import open_reader
from pipelines.training.checkpoint import dcp_files
from pipelines.training.checkpoint.checkpointer import Checkpoints, Position
from pipelines.training.checkpoint.store import CheckpointStore
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.small_training import Training


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    training = Training(options)
    training.step()
    readers: list[str] = []

    def open_for_bulk(paths: list[Path], device: Any) -> Any:
        reader = open_reader(paths, device, options["reader"])
        readers.append(reader.name)
        return reader

    dcp_files.open_for_bulk = open_for_bulk

    def restore() -> tuple[float, dict[str, Any]]:
        store = CheckpointStore(folder / "checkpoints")
        Checkpoints(store, training.model, training.optimizer).restore()
        training.synchronize()
        return training.state_bytes, {"reader": readers[-1]}

    saving = CheckpointStore(folder / "saved")
    checkpoints = Checkpoints(saving, training.model, training.optimizer, keep=1)

    def save() -> float:
        shutil.rmtree(folder / "saved", ignore_errors=True)
        checkpoints.save(Position(1))
        checkpoints.wait()
        return training.state_bytes

    return restore if options["reader"] else save


if __name__ == "__main__":
    serve(prepare)
