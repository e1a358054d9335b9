"""What Ray Train tells the workers' PyTorch: the variables of torchrun, and nothing more.

The stage connects its processes itself, as it does under torchrun. Ray's own `TorchTrainer` imports
PyTorch in the driver and in the controller too, where nothing is computed: seconds before the first
step.
"""

import os
from typing import Any

import psutil  # type: ignore[import-untyped]
import ray
from ray.train import BackendConfig
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend


class TorchVariables(BackendConfig):  # type: ignore[misc]  # Ray has no types
    """The backend configuration of a `DataParallelTrainer`."""

    @property
    def backend_cls(self) -> type[Backend]:
        """Who sets them."""
        return _TorchVariables


class _TorchVariables(Backend):  # type: ignore[misc]
    share_cuda_visible_devices = True  # a worker picks its own by LOCAL_RANK

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:  # noqa: ARG002
        """Rank 0's node is where all meet."""
        address, port = worker_group.execute_single(0, get_address_and_port)
        worker_group.execute(_set_variables, address, port)


def _set_variables(address: str, port: int) -> None:
    worker = ray.train.get_context()
    os.environ |= {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(worker.get_world_rank()),
        "WORLD_SIZE": str(worker.get_world_size()),
        "LOCAL_RANK": str(worker.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(worker.get_local_world_size()),
        "NODE_RANK": str(worker.get_node_rank()),
    }
    if interface := interface_of(ray.util.get_node_ip_address()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None where none has, as behind a translation.

    Left alone, gloo listens where the host's own name leads, which on many hosts is the loopback.
    """
    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    return next(
        (name for name, has in interfaces.items() if any(each.address == address for each in has)),
        None,
    )
