"""The model that a process measured last stays in memory for the tasks that follow.

An evaluation is many short tasks over one model, whose loading may take longer than any of them.
"""

from pathlib import Path

import torch

from pipelines.models.folder import CONFIG, weight_files
from pipelines.models.served import Model, load_model

_Files = tuple[tuple[Path, int, int], ...]
_held: dict[_Files, Model] = {}  # one at most


def inference_device() -> torch.device:
    """The machine's accelerator, or its processor: the one place where that is chosen."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def held_model(folder: Path) -> Model:
    """`load_model` on this device, for inference; not loaded again while its files stand.

    Whoever gets it computes with it, and changes nothing of it.

    Raises:
        UserError: see `load_pretrained`.
    """
    files = _files(folder)
    if files not in _held:
        let_go()  # two of them may not fit
        _held[files] = load_model(folder, inference_device()).eval()
    return _held[files]


def let_go() -> None:
    """Free the memory for what needs it beside this module's users, in whichever process."""
    _held.clear()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _files(folder: Path) -> _Files:
    paths = [(folder / CONFIG).resolve(), *(path.resolve() for path in weight_files(folder))]
    states = [path.stat() for path in paths]
    return tuple(
        (path, state.st_size, state.st_mtime_ns) for path, state in zip(paths, states, strict=True)
    )
