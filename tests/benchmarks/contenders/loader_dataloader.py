"""PyTorch's DataLoader over a map-style dataset on a memory map, with its best worker setting."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.loader_workers import rounds_of_best

_SAMPLES_A_MAP = 64  # what stays mapped could not be dropped from the page cache


class MemmapDataset(Dataset):
    def __init__(self, path: Path, sequence: int, tokens: int) -> None:
        self._path = path
        self._sequence = sequence
        self._samples = (tokens - 1) // sequence
        self._read = 0
        self._data: np.ndarray | None = None

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._data is None or self._read % _SAMPLES_A_MAP == 0:
            self._data = np.memmap(self._path, dtype=np.uint16, mode="r")
        self._read += 1
        start = index * self._sequence
        ids = torch.from_numpy(self._data[start : start + self._sequence + 1].astype(np.int64))
        return ids[:-1], ids[1:]


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    torch.set_num_threads(1)
    dataset = MemmapDataset(folder / "train.bin", options["sequence"], options["tokens"])

    def build(workers: int) -> DataLoader:
        return DataLoader(dataset, options["batch"], shuffle=True, num_workers=workers)

    return rounds_of_best(build, folder, options)


if __name__ == "__main__":
    serve(prepare)
