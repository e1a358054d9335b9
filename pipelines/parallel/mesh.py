"""Processes as a mesh of named dimensions, the same with one process as with thousands."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from pipelines.core.errors import UserError
from pipelines.parallel.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """This process's place among all.

    Attributes:
        device: Of this process.
        devices: All dimensions of the layout by their names; None without a process group.
        stall_seconds: The time after which the watchdog names a stalled process.
    """

    layout: Layout
    device: torch.device
    devices: DeviceMesh | None = None
    stall_seconds: float = 0.0

    @property
    def connected(self) -> DeviceMesh:
        """`devices`; raises ValueError without a process group."""
        if self.devices is None:
            raise ValueError("there is no process group")
        return self.devices

    @property
    def rank(self) -> int:
        """This process's rank among all."""
        return dist.get_rank() if self.devices is not None else 0

    @property
    def dp_rank(self) -> int:
        """Which share of each batch is this process's."""
        return self.coordinate("dp_replicate") * self.layout.dp_shard + self.coordinate("dp_shard")

    @property
    def dp_world(self) -> int:
        """Into how many shares a batch is divided."""
        return self.layout.dp

    @property
    def token_rank(self) -> int:
        """This process among those that see tokens of their own: samples, or parts of them."""
        return self.dp_rank * self.layout.cp + self.coordinate("cp")

    def coordinate(self, name: str) -> int:
        """Return this process's place along a dimension."""
        return 0 if self.devices is None else self.devices.get_local_rank(name)

    def along(self, *names: str) -> DeviceMesh | None:
        """Return the processes that differ from this one in these dimensions only; None where
        alone.
        """
        if self.devices is None or all(getattr(self.layout, name) == 1 for name in names):
            return None
        return self.line(*names)

    def line(self, *names: str) -> DeviceMesh:
        """Return a mesh of one dimension, as `along` does, even if this process is alone in it."""
        several = tuple(name for name in names if getattr(self.layout, name) > 1) or names[:1]
        if len(several) == 1:  # a new communicator only where no dimension has one
            return self.connected[several[0]]
        flat = self.connected[several]._flatten("_".join(several))
        set_timeout(self.stall_seconds, flat.get_group())
        return flat

    def experts(self, ep: int) -> tuple[DeviceMesh, DeviceMesh]:
        """Return the processes with the same experts, and neighbours that share a layer's experts.

        Together they are those of `dp_shard` and `cp`.
        """
        shards = self.line("dp_shard", "cp")
        sizes = shards.size() // ep, ep
        both = shards._unflatten(0, sizes, ("same_experts", "ep"))
        for group in both.get_all_groups():
            set_timeout(self.stall_seconds, group)
        return both["same_experts"], both["ep"]

    def sum(self, tensor: Tensor, *names: str) -> None:
        """Add it up, in place, over the processes that differ in these dimensions."""
        for name in names:
            if (along := self.along(name)) is not None:
                dist.all_reduce(tensor, group=along.get_group())


def group_timeout(stall_seconds: float) -> timedelta:
    """Return how long a collective may wait: twice as long as until the watchdog names who stalls.

    NCCL would else end all processes at the same moment, and nobody would know why.
    """
    return max(timedelta(seconds=2 * stall_seconds), default_pg_timeout)


def set_timeout(stall_seconds: float, group: dist.ProcessGroup | None = None) -> None:
    """Let a group, by default that of all processes, wait for `group_timeout`.

    PyTorch gives a group of some processes the timeout of its backend, not that of the whole group.
    """
    if dist.get_backend(group) in ("nccl", "gloo"):
        _set_pg_timeout(group_timeout(stall_seconds), group)


def build_mesh(layout: Layout, device: torch.device, stall_seconds: float = 0.0) -> Mesh:
    """Connect the processes by dimension; every process calls it.

    Args:
        layout: The number of processes along each dimension.
        device: Of this process.
        stall_seconds: The time after which the watchdog names a stalled process.

    Raises:
        UserError: the layout is not that of the processes there are.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout.world != world:
        raise UserError(f"parallel: {layout} = {layout.world} processes, but there are {world}")
    if not dist.is_initialized():
        return Mesh(layout, device)
    names, sizes = zip(*vars(layout).items(), strict=True)
    devices = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    for group in (None, *devices.get_all_groups()):
        set_timeout(stall_seconds, group)
    return Mesh(layout, device, devices, stall_seconds)
