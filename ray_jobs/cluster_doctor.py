"""`penstock doctor` on every node of a cluster; `python -m ray_jobs.cluster_doctor` prints it.

One actor a node, which asks for no resources: it runs beside whatever else the node does.
"""

import json
import os
import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipelines.doctor.all_reduce import Group, Reduced
from pipelines.doctor.cluster import (
    FENCE,
    RECIPE,
    REPORT,
    Carried,
    ClusterReport,
    NodeReport,
    Together,
    own_problems,
)
from pipelines.doctor.node import Node
from pipelines.doctor.planes import VARIABLE, parse_planes
from pipelines.recipe.recipe import Recipe
from ray_jobs.connection import connect
from ray_jobs.draining import drain

_PINGS = 5
_HEAD = "node:__internal_head__"  # a resource that Ray gives the head


class Member(NamedTuple):
    """A node of the cluster, and our actor there."""

    node: str
    is_head: bool
    name: str
    address: str
    actor: Any


def main() -> None:
    """Look at all nodes at once, then between them; the report is the last line of the log."""
    connect()
    members = [_member(node) for node in ray.nodes() if node["Alive"]]
    ray.get([member.actor.time.remote() for member in members])  # all have started
    nodes = _examine(members, Recipe.model_validate(json.loads(os.environ[RECIPE])))
    together, planes = _reduce(members), list(_carry(members))
    if os.environ.get(FENCE):
        nodes = _fence(members, nodes)
    report = ClusterReport(nodes=nodes, together=together, planes=planes)
    print(f"\n{REPORT}{report.model_dump_json()}", flush=True)  # noqa: T201


def _member(node: dict[str, Any]) -> Member:
    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    actor = ray.remote(num_cpus=0, scheduling_strategy=strategy)(Node).remote()
    address, name = node["NodeManagerAddress"], node["NodeName"]
    named = address if name == address else f"{name} ({address})"
    return Member(node["NodeID"], _HEAD in node["Resources"], named, address, actor)


def _examine(members: list[Member], recipe: Recipe) -> list[NodeReport]:
    clocks = [_clock(member.actor) for member in members]  # before they work, and answer late
    examined = ray.get([member.actor.examine.remote(recipe) for member in members])
    return [
        NodeReport(
            name=member.name,
            offset=offset,
            uncertainty=uncertainty,
            facts=facts,
            findings=findings,
        )
        for member, (offset, uncertainty), (facts, findings) in zip(
            members, clocks, examined, strict=True
        )
    ]


def _fence(members: list[Member], reports: list[NodeReport]) -> list[NodeReport]:
    """Drain the nodes that have a problem of their own; no cluster can do without its head."""
    told = []
    for member, report, problems in zip(members, reports, own_problems(reports), strict=True):
        reason = f"penstock doctor: {'; '.join(problems)}"
        is_fenced = bool(problems) and not member.is_head and drain(member.node, reason, 0)
        told.append(report.model_copy(update={"is_fenced": is_fenced}))
    return told


def _clock(actor: Any) -> tuple[float, float]:
    """Offset and half the round trip, of the shortest of some, as NTP takes it."""
    trips = []
    for _ in range(_PINGS):
        sent = time.time()
        there = ray.get(actor.time.remote())
        came = time.time()
        trips.append((came - sent, there - (sent + came) / 2))
    trip, offset = min(trips)
    return offset, trip / 2


def _reduce(members: list[Member]) -> Together | None:
    """Over all GPUs, or where there are none over a process of each node."""
    devices = ray.get([member.actor.devices.remote() for member in members])
    on_gpu = any(devices)
    shares = zip(members, devices if on_gpu else [1] * len(members), strict=True)
    taking = [(member, here) for member, here in shares if here]
    if len(taking) < 2:
        return None
    ends = list(accumulate(here for _, here in taking))
    first = taking[0][0]
    address = f"tcp://{first.address}:{ray.get(first.actor.free_port.remote())}"
    parts = ray.get(
        [
            member.actor.reduce.remote(
                Group(address=address, world=ends[-1], first=end - here, here=here, on_gpu=on_gpu)
            )
            for (member, here), end in zip(taking, ends, strict=True)
        ]
    )
    together = Together(nodes=len(taking), processes=ends[-1], on_gpu=on_gpu)
    if faults := [part for part in parts if isinstance(part, str)]:
        return together.model_copy(update={"fault": faults[0]})
    outcome = Reduced(
        right=all(part.right for part in parts), bandwidth=min(part.bandwidth for part in parts)
    )
    return together.model_copy(update={"outcome": outcome})


def _carry(members: list[Member]) -> Iterator[Carried]:
    """Send on each plane from every node to the next, one link after the other, and sum."""
    for plane, interfaces in parse_planes(os.environ.get(VARIABLE, "")).items():
        total, slowest = 0.0, ""
        try:
            for interface in interfaces:
                rate, slowest = _around(members, interface)
                total += rate
        except ConnectionError as error:
            yield Carried(plane=plane, fault=str(error))
        else:
            yield Carried(plane=plane, rate=total, slowest=slowest)


def _around(members: list[Member], interface: str) -> tuple[float, str]:
    """Return the slowest of the rates, and between whom.

    Raises:
        ConnectionError: an interface has no address, or one node does not reach the next.
    """
    addresses = ray.get([member.actor.listen.remote(interface) for member in members])
    nexts = [*range(1, len(members)), 0]
    for member, address in zip(members, addresses, strict=True):
        if address is None:
            raise ConnectionError(f"{interface} has no IPv4 address on {member.name}")
    rates = ray.get(
        [
            member.actor.send.remote(addresses[other])
            for member, other in zip(members, nexts, strict=True)
        ]
    )
    ray.get([member.actor.hush.remote() for member in members])
    ways = [
        f"{member.name} to {members[other].name}"
        for member, other in zip(members, nexts, strict=True)
    ]
    for way, rate in zip(ways, rates, strict=True):
        if isinstance(rate, str):
            raise ConnectionError(f"{interface} from {way}: {rate}")
    return min(zip(rates, ways, strict=True))


if __name__ == "__main__":
    main()
