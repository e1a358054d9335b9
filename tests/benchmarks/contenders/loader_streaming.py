"""mosaicml-streaming: samples in its MDS format, shuffled by it, with its best worker setting."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.loader_workers import rounds_of_best

FOLDER = "mds"


def _without_vision() -> None:
    """Stand-ins for torchvision, which is imported there for images and must fit torch's build."""
    for name in ("", ".datasets", ".transforms", ".transforms.functional"):
        module = ModuleType(f"torchvision{name}")
        module.__spec__ = ModuleSpec(module.__name__, loader=None)
        sys.modules[module.__name__] = module
    datasets = sys.modules["torchvision.datasets"]
    datasets.VisionDataset = datasets.CIFAR10 = object
    sys.modules["torchvision.transforms.functional"].to_tensor = None


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    torch.set_num_threads(1)
    _without_vision()
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    sequence = options["sequence"]
    if not (folder / FOLDER / "index.json").exists():
        write(folder, sequence)

    def collate(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(np.stack([each["ids"] for each in samples]).astype(np.int64))
        return ids[:, :-1], ids[:, 1:]

    def build(workers: int) -> DataLoader:
        clean_stale_shared_memory()  # of the one before: a dataset serves one loader only
        dataset = StreamingDataset(
            local=str(folder / FOLDER), shuffle=True, batch_size=options["batch"]
        )
        return DataLoader(dataset, options["batch"], num_workers=workers, collate_fn=collate)

    return rounds_of_best(build, folder, options)


def write(folder: Path, sequence: int) -> None:
    from streaming import MDSWriter

    data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
    columns = {"ids": f"ndarray:uint16:{sequence + 1}"}
    with MDSWriter(out=str(folder / FOLDER), columns=columns) as out:
        for start in range(0, len(data) - sequence, sequence):
            out.write({"ids": np.array(data[start : start + sequence + 1])})


if __name__ == "__main__":
    serve(prepare)
