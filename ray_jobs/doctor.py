"""`penstock doctor` on every node of a cluster: `python -m ray_jobs.doctor` prints the report.

One actor a node, which asks for no resources: it runs beside whatever else the node does.
"""

import json
import os
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipelines.core.recipe import Recipe
from pipelines.doctor.cluster import RECIPE, REPORT, NodeReport, as_json
from pipelines.doctor.findings import Finding

_PINGS = 5


class Node:
    """What runs on a node."""

    def time(self) -> float:
        """Of its clock."""
        return time.time()

    def examine(self, recipe: dict[str, Any]) -> tuple[dict[str, str | None], list[Finding]]:
        """Its versions, and what its checks found."""
        from pipelines.doctor.node import examine

        return examine(Recipe.model_validate(recipe))


def main() -> None:
    """Look at all nodes at once, and print the report as the log's last line."""
    ray.init()
    recipe = json.loads(os.environ[RECIPE])
    alive = [node for node in ray.nodes() if node["Alive"]]
    actors = [_actor(node["NodeID"]) for node in alive]
    ray.get([actor.time.remote() for actor in actors])  # all have started
    clocks = [_clock(actor) for actor in actors]  # before they work: a busy node answers late
    examined = ray.get([actor.examine.remote(recipe) for actor in actors])
    reports = [
        NodeReport(
            name=_name(node),
            offset=offset,
            uncertainty=uncertainty,
            facts=facts,
            findings=findings,
        )
        for node, (offset, uncertainty), (facts, findings) in zip(
            alive, clocks, examined, strict=True
        )
    ]
    print(f"\n{REPORT}{json.dumps(as_json(reports))}", flush=True)  # noqa: T201


def _actor(node_id: str) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=strategy)(Node).remote()


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


def _name(node: dict[str, Any]) -> str:
    address, name = node["NodeManagerAddress"], node["NodeName"]
    return address if name == address else f"{name} ({address})"


if __name__ == "__main__":
    main()
