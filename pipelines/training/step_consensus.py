"""Asks all ranks after each step whether one of them wants something, without a wait.

Each rank's vote travels with its loss, which is added up over all ranks anyway. The host reads the
sum one step late, when it is there already, while the device works on the step after it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipelines.parallel.mesh import Mesh


class _Votes(NamedTuple):
    """How many ranks wanted something in a step: the number on its way to the host."""

    number: Tensor  # a scalar on the CPU
    arrived: torch.Event | None  # None: it is there


class StepConsensus:
    """Tells every rank the same: whether one of them wants something."""

    def __init__(self, mesh: Mesh) -> None:
        """Begin with no votes."""
        self._mesh = mesh
        self._before = self._now = _Votes(torch.zeros(()), None)

    def sum(self, nats: Tensor, *names: str, wanted: bool) -> Tensor:
        """Add up the loss and the votes over the ranks.

        Args:
            nats: A scalar on the device.
            names: Of the mesh's dimensions whose processes have different tokens.
            wanted: Whether this rank wants something.

        Returns:
            The sum, a scalar.
        """
        both = torch.stack((nats, torch.full_like(nats, float(wanted))))
        self._mesh.sum(both, *names)
        total, votes = both.unbind()
        others = [name for name in vars(self._mesh.layout) if name not in names]
        self._mesh.sum(votes, *others)
        self._before, self._now = self._now, _to_host(votes)
        return total

    def is_wanted(self) -> bool:
        """Return whether a rank wanted something in the step before the last one."""
        if self._before.arrived is not None:
            self._before.arrived.synchronize()
        return self._before.number.item() > 0


def _to_host(votes: Tensor) -> _Votes:
    if votes.device.type == "cpu":
        return _Votes(votes, None)
    copy = votes.to("cpu", non_blocking=True)  # to pinned memory: nobody waits
    return _Votes(copy, torch.accelerator.current_stream().record_event())
