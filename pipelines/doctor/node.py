"""One node of a cluster: what the job's actor does there."""

import platform
import time

from pipelines.core.machine import free_port
from pipelines.doctor.all_reduce import Group, Reduced, reduced
from pipelines.doctor.checks import node_checks
from pipelines.doctor.driver_and_cuda import torch_build
from pipelines.doctor.examination import run_checks
from pipelines.doctor.findings import FaultError, Finding, NotHereError
from pipelines.doctor.nvidia_smi import smi
from pipelines.doctor.throughput import Sink, address_of, send
from pipelines.doctor.tools import installed
from pipelines.doctor.torch_probe import facts
from pipelines.recipe.recipe import Recipe

_REDUCE_S = 60.0  # NCCL builds its rings over all nodes first
_SEND_S = 1.0


class Node:
    """What the job asks of a node; everything goes and comes as plain values."""

    def __init__(self) -> None:
        """Nothing listens yet."""
        self._sink: Sink | None = None

    def time(self) -> float:
        """Return what the node's clock says."""
        return time.time()

    def free_port(self) -> int:
        """Return where the first process of an all-reduce may listen."""
        return free_port()

    def examine(self, recipe: Recipe) -> tuple[dict[str, str | None], list[Finding]]:
        """Return the versions of what must be alike on every node, and the checks."""
        findings = run_checks(node_checks(recipe))
        return _facts(), findings

    def devices(self) -> int:
        """Return GPUs that torch can use; 0 where it can't be asked, which the checks tell."""
        try:
            return facts().devices
        except (NotHereError, FaultError):
            return 0

    def reduce(self, group: Group) -> Reduced | str:
        """Run this node's part of an all-reduce, or return why it failed."""
        try:
            return reduced(group, _REDUCE_S)
        except FaultError as error:
            return str(error)

    def listen(self, interface: str) -> tuple[str, int] | None:
        """Return where others may send to on an interface; None where it has no address."""
        self.hush()
        address = address_of(interface)
        if address is None:
            return None
        self._sink = Sink(address)
        return self._sink.address

    def send(self, address: tuple[str, int]) -> float | str:
        """Bytes/s to another node, or why nothing went."""
        try:
            return send(address, _SEND_S)
        except OSError as error:
            return str(error)

    def hush(self) -> None:
        """Listen no more."""
        if self._sink is not None:
            self._sink.close()
            self._sink = None


def _facts() -> dict[str, str | None]:
    try:
        driver = smi().driver
    except (NotHereError, FaultError):
        driver = None
    try:
        cuda, torch = torch_build()
    except NotHereError:
        cuda, torch = None, None
    return {
        "ray": installed("ray"),
        "python": platform.python_version(),
        "torch": torch,
        "cuda": cuda,
        "driver": driver,
        "penstock": installed("penstock"),
    }
