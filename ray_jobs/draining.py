"""Nodes of the cluster that will be taken away, which Ray calls draining.

Ray's autoscaler drains a node, and so does `ray drain-node`. Work that is there goes on; new work
is given to other nodes only. Ray ends the node when nothing runs there any more, but nothing that
still runs at the deadline: that is left to whoever takes the node away.
"""

import logging
import time

import ray
import ray.train
from ray._private.state import state
from ray._private.worker import global_worker
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.exceptions import RpcError
from typing_extensions import override

from pipelines.training import preemption
from pipelines.training.machine_notice import MachineNotice
from pipelines.training.machines import Machines

_log = logging.getLogger(__name__)


def draining() -> dict[str, float | None]:
    """Return the ids of draining nodes, and how many seconds each has left, if that is known."""
    now = time.time()
    ends: dict[str, int] = state.get_draining_nodes()  # in ms of the clock; 0: not said
    return {node: max(0.0, end / 1000 - now) if end else None for node, end in ends.items()}


def leave_this_node(notice: MachineNotice) -> None:
    """Drain this worker's node, and ask the run to save and end, so that it goes on elsewhere.

    A node that is not drained may get the next workers, too; the save must not wait for that.
    """
    node, end = ray.get_runtime_context().get_node_id(), time.time() + notice.seconds
    if node not in draining():
        drain(node, notice.reason, int(end * 1000))
    preemption.ask(notice.reason)


class RayNodes(Machines):
    """The nodes of the workers, by their ids."""

    @override
    def here(self) -> str:
        node: str = ray.get_runtime_context().get_node_id()
        return node

    @override
    def leave(self, machine: str, reason: str) -> bool:
        """Drain a node if the others have room for all workers; return whether it is so.

        Without such room the run would wait for another machine, which nobody was asked for.
        """
        left, assigned = draining(), ray.get_runtime_context().get_assigned_resources()
        needed = {name: amount for name, amount in assigned.items() if amount}
        others = (
            each["Resources"]
            for each in ray.nodes()
            if each["Alive"] and each["NodeID"] != machine and each["NodeID"] not in left
        )
        room = sum(
            min(int(has.get(name, 0) // amount) for name, amount in needed.items())
            for has in others
        )
        if room < ray.train.get_context().get_world_size():
            return False
        return machine in left or drain(machine, reason, 0)


def drain(node: str, reason: str, end: int) -> bool:
    """Ask Ray to drain a node; `end` is when it goes, in ms of the clock, or 0."""
    kind = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    try:
        taken, why_not = global_worker.gcs_client.drain_node(node, kind, reason, end)
    except RpcError as error:
        taken, why_not = False, str(error)
    if not taken:
        _log.warning("Ray does not drain this node: %s", why_not)
    return bool(taken)
