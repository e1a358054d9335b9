"""Any process may want all of them to meet after the same step; to know of it costs no wait.

The wish travels with the loss, which is added up over all processes anyway. The host looks one
step late, when the sum is there while the device is busy with the step after it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipelines.parallel.mesh import Mesh


class _Wishes(NamedTuple):
    """How many processes wanted attention in a step, on its way to the host."""

    number: Tensor  # a scalar on the CPU
    arrived: torch.Event | None  # None: it is there


class Attention:
    """Tells every process alike whether one of them wants something."""

    def __init__(self, mesh: Mesh) -> None:
        """No process wants anything yet."""
        self._mesh = mesh
        self._before = self._now = _Wishes(torch.zeros(()), None)

    def sum(self, nats: Tensor, *names: str, wanted: bool) -> Tensor:
        """Add up the loss, and what processes want with it.

        Args:
            nats: A scalar on the device.
            names: Of the mesh's dimensions whose processes have different tokens.
            wanted: Whether this process wants attention.

        Returns:
            The sum, a scalar.
        """
        both = torch.stack((nats, torch.full_like(nats, float(wanted))))
        self._mesh.sum(both, *names)
        total, wishes = both.unbind()
        others = [name for name in vars(self._mesh.layout) if name not in names]
        self._mesh.sum(wishes, *others)
        self._before, self._now = self._now, _on_its_way(wishes)
        return total

    def is_wanted(self) -> bool:
        """Whether a process wanted it in the step before the last one: the same for all."""
        if self._before.arrived is not None:
            self._before.arrived.synchronize()
        return self._before.number.item() > 0


def _on_its_way(wishes: Tensor) -> _Wishes:
    if wishes.device.type == "cpu":
        return _Wishes(wishes, None)
    copy = wishes.to("cpu", non_blocking=True)  # to pinned memory: nobody waits
    return _Wishes(copy, torch.accelerator.current_stream().record_event())
