"""A cluster: every node's own checks as a Ray job, and what only shows between nodes.

`ray_jobs/cluster_doctor.py` is the job; this module asks for it, and judges what it reports.
"""

import asyncio
import json
import os
import uuid
from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ConfigDict

from pipelines.core.errors import UserError
from pipelines.core.product import CODE, PRODUCT
from pipelines.core.settings import load_settings
from pipelines.doctor.all_reduce import Reduced
from pipelines.doctor.findings import FaultError, Finding, Seen, State, ok, problem, warning
from pipelines.doctor.planes import CLASSES
from pipelines.doctor.planes import VARIABLE as PLANES
from pipelines.doctor.tools import read
from pipelines.recipe.recipe import Recipe

REPORT = "penstock doctor: "  # begins the line of the job's log that holds its report
RECIPE = "PENSTOCK_DOCTOR_RECIPE"  # the recipe, for the job
FENCE = "PENSTOCK_DOCTOR_FENCE"  # whether it drains nodes
_LIMIT_S = 240.0  # a cluster that scales from nothing starts its nodes first
_POLL_S = 1.0
_NODE_S = "60"  # of each node's own checks: nobody waits for them alone
_MUCH_S, _TOO_MUCH_S = 0.1, 60.0
_GIB = 1 << 30
_BY_TCP = ("inference", "users")
_NETWORK = (
    "see each node's InfiniBand, GPUDirect RDMA and planes; NCCL_DEBUG=INFO names the way it takes"
)
_FACTS = ("ray", "python", "torch", "cuda", "driver", "penstock")


class NodeReport(BaseModel):
    """What a node told.

    Attributes:
        name: Its address, and its name where that differs.
        offset: Of its clock against the job's driver's, in seconds.
        uncertainty: Half of the shortest round trip, in seconds.
        facts: Versions by name; null where there is none.
        findings: Of its own checks.
        is_fenced: Whether it takes no more work from now on.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    offset: float
    uncertainty: float
    facts: dict[str, str | None]
    findings: list[Finding]
    is_fenced: bool = False


class Together(BaseModel):
    """An all-reduce over nodes; `outcome` is None where it failed, and `fault` says how."""

    model_config = ConfigDict(frozen=True)

    nodes: int
    processes: int
    on_gpu: bool
    outcome: Reduced | None = None
    fault: str = ""


class Carried(BaseModel):
    """What TCP carried on a plane from each node to the next at once: bytes/s of the slowest."""

    model_config = ConfigDict(frozen=True)

    plane: str
    rate: float | None = None
    slowest: str = ""  # from whom to whom
    fault: str = ""


class ClusterReport(BaseModel):
    """All that the job tells."""

    model_config = ConfigDict(frozen=True)

    nodes: list[NodeReport]
    together: Together | None = None
    planes: list[Carried] = []


def report_of(recipe: Recipe, *, fence: bool = False) -> ClusterReport:
    """Run the job, with this machine's code.

    Args:
        recipe: Which the nodes must be fit for.
        fence: Let a node take no more work if it has a problem that another one does not have.

    Raises:
        FaultError: it fails, or does not end.
    """
    import httpx

    try:
        return asyncio.run(_run_job(_variables(recipe) | ({FENCE: "1"} if fence else {})))
    except (httpx.HTTPError, UserError) as error:
        fix = "`ray status` and the dashboard's log show what the head does"
        saw = f"no job could be run on the nodes: {error or type(error).__name__}"
        raise FaultError(saw, fix) from None


async def _run_job(variables: dict[str, str]) -> ClusterReport:
    from pipelines.orchestration.jobs_api import jobs_api, upload_code

    name = f"doctor-{uuid.uuid4().hex[:12]}"
    async with jobs_api() as jobs:
        code = await upload_code(jobs, PRODUCT, CODE)
        environment = {"working_dir": code, "env_vars": variables}
        await jobs.submit(name, "python -m ray_jobs.cluster_doctor", environment, {})
        try:
            async with asyncio.timeout(_LIMIT_S):
                while (job := await jobs.get(name)) and job.live:
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            await jobs.stop(name)
            fix = f"`ray status` shows what it waits for; its log: `ray job logs {name}`"
            raise FaultError(f"the job {name} did not end in {_LIMIT_S:.0f} s", fix) from None
        log = await jobs.logs(name)
    if job is None or job.status != "SUCCEEDED":
        said = (job and job.message) or "it is gone"
        raise FaultError(f"the job {name} failed: {said}", f"ray job logs {name}")
    return parse_report(log)


def parse_report(log: str) -> ClusterReport:
    """Read the report from the job's log: the last line that is one."""
    lines = [line for line in log.splitlines() if line.startswith(REPORT)]
    if not lines:
        raise FaultError("the job's log holds no report", "ray job logs shows it whole")
    return read(ClusterReport.model_validate_json, lines[-1][len(REPORT) :], "the job's report")


def _variables(recipe: Recipe) -> dict[str, str]:
    settings = load_settings()
    passed = {name: value for name in (PLANES,) if (value := os.environ.get(name))}
    return passed | {
        RECIPE: json.dumps(recipe.to_dict()),
        "PENSTOCK_HOME": str(settings.home),
        "PENSTOCK_DOCTOR_SECONDS": _NODE_S,
        # An actor that asks for no GPU must see them all the same.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    }


def own_problems(reports: Sequence[NodeReport]) -> list[list[str]]:
    """Return the problems of each node, without those that all have: no node is at fault there."""
    found = [
        {each.check: each.saw for each in report.findings if each.state == State.PROBLEM}
        for report in reports
    ]
    shared = set.intersection(*map(set, found))
    return [
        [f"{check}: {saw}" for check, saw in each.items() if check not in shared] for each in found
    ]


def of_node(report: NodeReport) -> list[Finding]:
    """Return what a node told, and whether it takes no more work."""
    if not report.is_fenced:
        return report.findings
    saw = "Ray gives this node no more work, and ends it when what it has is done"
    why, fix = "runs go on on the other nodes", "repair the node, and start its Ray again"
    return [Finding("fence", State.WARNING, saw, why, fix), *report.findings]


def between_nodes(report: ClusterReport) -> list[Finding]:
    """Return what no node can see alone."""
    nodes, together = report.nodes, report.together
    told = (
        (
            "versions over nodes",
            "tasks are pickled on one node and read on another",
            assess_versions(nodes),
        ),
        ("clocks over nodes", "leases, logs and S3 go by the time", [assess_clocks(nodes)]),
        (
            "all-reduce over nodes",
            "gradients cross the network each step",
            [assess_all_reduce(together)] if together else (),
        ),
        (
            "planes between nodes",
            "a link may agree on a rate that its switch does not carry",
            map(assess_throughput, report.planes),
        ),
    )
    return [
        Finding(name, seen.state, seen.saw, why, seen.fix)
        for name, why, all_seen in told
        for seen in all_seen
    ]


def assess_versions(reports: Sequence[NodeReport]) -> Iterator[Seen]:
    """Yield every fact should be the same on all nodes; a driver may differ on a mixed cluster."""
    unlike = False
    for fact in _FACTS:
        by_version: dict[str | None, list[str]] = {}
        for report in reports:
            by_version.setdefault(report.facts.get(fact), []).append(report.name)
        if len(by_version) == 1:
            continue
        unlike = True
        saw = f"{fact}: " + "; ".join(
            f"{version or 'none'} on {_names(names)}" for version, names in by_version.items()
        )
        fix = "start all nodes from one image; `ray up` or the chart restarts those that differ"
        yield warning(saw, fix) if fact == "driver" else problem(saw, fix)
    if not unlike:
        facts = reports[0].facts
        said = ", ".join(f"{fact} {facts[fact]}" for fact in _FACTS if facts.get(fact))
        yield ok(f"{len(reports)} nodes alike: {said}")


def assess_clocks(reports: Sequence[NodeReport]) -> Seen:
    """Return the widest gap, less what the round trips leave open."""
    first = min(reports, key=lambda report: report.offset)
    last = max(reports, key=lambda report: report.offset)
    skew = last.offset - first.offset
    sure = skew - first.uncertainty - last.uncertainty
    if sure <= _MUCH_S:
        return ok(f"{len(reports)} clocks within {max(0.0, skew):.3f} s")
    saw = f"{last.name} is {skew:.3f} s ahead of {first.name}"
    fix = "let both follow one time server (chrony)"
    return problem(saw, fix) if sure > _TOO_MUCH_S else warning(saw, fix)


def assess_all_reduce(found: Together) -> Seen:
    """Compare the bus bandwidth with the class of the nodes' GPU network.

    Without GPUs it shows that processes reach each other, and its rate is the processors'.
    """
    who = "GPUs" if found.on_gpu else "processes (gloo)"
    saw = f"an all-reduce over {found.processes} {who} of {found.nodes} nodes"
    if found.outcome is None:
        return problem(f"{saw}: {found.fault}", _NETWORK)
    if not found.outcome.right:
        return problem(f"{saw} gave a wrong sum", "bisect by node: one computes or sends wrongly")
    rate, (least, most) = found.outcome.bandwidth, CLASSES["gpu"]
    saw = f"{saw}: bus bandwidth {rate / _GIB:.3g} GiB/s"
    if not found.on_gpu:
        return ok(saw)
    saw = f"{saw}, the GPU plane's class is {least:g}-{most:g}"
    return ok(saw) if rate >= least * _GIB else warning(saw, _NETWORK)


def assess_throughput(found: Carried) -> Seen:
    """Assess the TCP rate between nodes; on planes that TCP can't fill, only report it."""
    if found.rate is None:
        fix = "look at addresses, routes and firewalls of that plane"
        return problem(f"{found.plane}: {found.fault}", fix)
    least, most = CLASSES[found.plane]
    saw = f"{found.plane}: TCP carried {found.rate / _GIB:.3g} GiB/s from {found.slowest}"
    if found.plane not in _BY_TCP:
        return ok(f"{saw}; its class of {least:g}-{most:g} is RDMA's")
    saw = f"{saw}, its class is {least:g}-{most:g}"
    fix = "ethtool and iperf3 between the two; look at the switch's port, and at what else uses it"
    return ok(saw) if found.rate >= least * _GIB else warning(saw, fix)


def _names(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
