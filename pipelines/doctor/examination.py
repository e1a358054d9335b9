"""The whole examination: this machine, the services, and each node where there are several."""

from concurrent.futures import ThreadPoolExecutor

from pipelines.core.recipe import Recipe
from pipelines.doctor import cluster
from pipelines.doctor.checks import node_checks, service_checks
from pipelines.doctor.findings import FaultError, Finding, State
from pipelines.doctor.running import run_checks
from pipelines.doctor.services import ray_nodes

_WHY = "every node must be fit for what any of them may be given"


def examine(recipe: Recipe) -> dict[str, list[Finding]]:
    """What was found, by part.

    A cluster of one node is looked at as this machine: a job takes longer than all else here.
    """
    with ThreadPoolExecutor() as pool:
        machine = pool.submit(run_checks, node_checks(recipe))
        services = pool.submit(run_checks, service_checks(recipe))
        nodes = pool.submit(ray_nodes)
        found = {"this machine": machine.result(), "services": services.result()}
    if nodes.result() < 2:
        return found
    return found | _nodes(recipe)  # after what its job would disturb, where a node is this machine


def _nodes(recipe: Recipe) -> dict[str, list[Finding]]:
    try:
        report = cluster.report_of(recipe)
    except FaultError as error:
        fault = Finding("cluster", State.PROBLEM, str(error), _WHY, error.mend)
        return {"between nodes": [fault]}
    parts = {f"node {node.name}": node.findings for node in report.nodes}
    return {"between nodes": cluster.between_nodes(report), **parts}
