"""What Ray Train tells the workers' PyTorch: the variables of torchrun, and nothing more.

The stage connects its processes itself, as it does under torchrun. Ray's own `TorchTrainer` imports
PyTorch in the driver and in the controller too, where nothing is computed: seconds before the first
step.
"""

import os
from typing import Any

import ray
from ray.train import BackendConfig
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend


class TorchVariables(BackendConfig):  # type: ignore[misc]  # Ray has no types
    """Of a `DataParallelTrainer`."""

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
