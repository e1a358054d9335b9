"""Checkpoints of a training run: written by all processes, counted only once they are whole.

They are `torch.distributed.checkpoint` folders, so another number of processes can load them.
Randomness needs no place in them: the trainer seeds each step from the step.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from pipelines.core.errors import UserError
from pipelines.core.storage import MARKER, is_complete, mark_complete, read_json, write_text

KEEP = 2
_IDENTITY = "identity"


@dataclass(frozen=True)
class Position:
    """How far a run is; with the weights and the optimizer, all of its state."""

    step: int = 0  # optimizer steps done
    seconds: float = 0.0  # spent in them


def claim(folder: Path, identity: str) -> None:
    """Clear torn checkpoints, and all of them where another recipe or other data made them.

    Rank 0 calls it before training.
    """
    path = folder / _IDENTITY
    if not path.is_file() or path.read_text(encoding="utf-8") != identity:
        shutil.rmtree(folder, ignore_errors=True)
        write_text(path, identity)
    for torn in folder.glob("step-*"):
        if not is_complete(torn):
            shutil.rmtree(torn)


def latest_complete(folder: Path) -> Path | None:
    """The newest checkpoint whose marker was written; torn ones do not count."""
    complete = _complete(folder)
    return complete[-1] if complete else None


def save(folder: Path, position: Position, model: nn.Module, optimizer: Optimizer) -> None:
    """Write `step-000100`, say; every process calls it, and rank 0 marks it complete last."""
    # Seconds to import, so only where it is needed.
    from torch.distributed.checkpoint import state_dict_saver as dcp

    path = folder / f"step-{position.step:06d}"
    dcp.save(_state(model, optimizer), checkpoint_id=path, no_dist=not dist.is_initialized())
    _barrier()
    if _is_first():
        mark_complete(path, asdict(position))
        _drop_old(folder)


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> Position:
    """Put a checkpoint's weights and moments in place, and return where the run was.

    Raises:
        UserError: a file of it is damaged.
    """
    from torch.distributed.checkpoint import state_dict_loader as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import set_state_dict

    from pipelines.training.checkpoint_reader import CheckpointReader

    state = _state(model, optimizer)
    try:
        dcp.load(state, storage_reader=CheckpointReader(path), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        reason = " ".join(str(next(iter(error.failures.values()))[0]).split())
        raise UserError(
            f"{path}: the checkpoint can't be read: {reason}; delete it, and the run goes on from "
            "the one before it"
        ) from error
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return Position(**read_json(path / MARKER))


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Weights and moments by parameter name; the names are free of DDP's prefix."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _drop_old(folder: Path) -> None:
    """Keep the newest complete ones; what is older, torn or whole, is of no more use."""
    oldest_kept = _complete(folder)[-KEEP:][0]
    for path in folder.glob("step-*"):
        if _step(path) < _step(oldest_kept):
            (path / MARKER).unlink(missing_ok=True)  # never a marker on a half-deleted one
            shutil.rmtree(path)


def _complete(folder: Path) -> list[Path]:
    """The complete ones, oldest first."""
    return sorted(filter(is_complete, folder.glob("step-*")), key=_step)


def _step(path: Path) -> int:
    """What they are ordered by: as text, step-1000000 would come before step-999999."""
    return int(path.name.removeprefix("step-"))


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
