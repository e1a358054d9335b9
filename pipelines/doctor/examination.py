"""Checks run at once, as most of them wait; one that hangs is told, and holds nobody up.

The whole examination: this machine, the services, and each node where there are several.
"""

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pipelines.core.errors import UserError
from pipelines.doctor import cluster
from pipelines.doctor.checks import node_checks, service_checks
from pipelines.doctor.findings import (
    Check,
    FaultError,
    Finding,
    NoAnswerError,
    NotHereError,
    Seen,
    State,
    problem,
    warning,
)
from pipelines.doctor.services import ray_nodes
from pipelines.doctor.tools import limit_s
from pipelines.recipe.recipe import Recipe


def run_checks(checks: Sequence[Check]) -> list[Finding]:
    """Return what all of them found, in their order, after `limit_s()` seconds at most.

    A thread that hangs, say in a network file system, is left behind: it ends with the process.
    """
    limit = limit_s()
    seen: dict[int, list[Seen]] = {}

    def run(number: int) -> None:
        seen[number] = _run_check(checks[number])

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(checks))]
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hung = _late(
        f"no answer in {limit:g} s",
        "run the doctor again; where it stays so, a tool, a file system or a server hangs",
    )
    return [
        Finding(check.name, each.state, each.saw, check.why, each.fix)
        for number, check in enumerate(checks)
        for each in seen.get(number, [hung])
    ]


def _run_check(check: Check) -> list[Seen]:
    try:
        return list(check.look())
    except NotHereError as reason:
        return [Seen(State.NOT_HERE, str(reason))]
    except NoAnswerError as error:
        return [_late(str(error), error.fix)]
    except FaultError as error:
        return [problem(str(error), error.fix)]
    except UserError as error:
        return [problem(str(error), "fix it, and run the doctor again")]
    except Exception as error:  # one check that fails must not take the others with it
        saw = f"the check itself failed: {type(error).__name__}: {error}"
        return [problem(saw, "this is a fault of the doctor or of what it asked; please report it")]


def _late(saw: str, fix: str) -> Seen:
    """Return a problem, unless more runs here than there are cores, so that it may only be slow."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return problem(saw, fix)
    busy = f"{saw}; the machine is busy (load {load:.1f} on {cores} cores)"
    return warning(busy, f"set PENSTOCK_DOCTOR_SECONDS=60 and run it again; else {fix}")


_WHY = "every node must be fit for what any of them may be given"


def examine(recipe: Recipe, *, fence: bool = False) -> dict[str, list[Finding]]:
    """Return what was found, by part; with `fence`, bad nodes of a cluster take no more work.

    A cluster of one node is looked at as this machine: a job takes longer than all else here.
    """
    with ThreadPoolExecutor() as pool:
        machine = pool.submit(run_checks, node_checks(recipe))
        services = pool.submit(run_checks, service_checks(recipe))
        nodes = pool.submit(ray_nodes)
        found = {"this machine": machine.result(), "services": services.result()}
    if nodes.result() < 2:
        return found
    # After what its job would disturb, where a node is this machine.
    return found | _nodes(recipe, fence=fence)


def _nodes(recipe: Recipe, *, fence: bool) -> dict[str, list[Finding]]:
    try:
        report = cluster.report_of(recipe, fence=fence)
    except FaultError as error:
        fault = Finding("cluster", State.PROBLEM, str(error), _WHY, error.fix)
        return {"between nodes": [fault]}
    parts = {f"node {node.name}": cluster.of_node(node) for node in report.nodes}
    return {"between nodes": cluster.between_nodes(report), **parts}
