"""Several nodes: the report of the job, and what only shows between them."""

import pytest

from pipelines.core.machine import free_port
from pipelines.doctor.all_reduce import Group, Reduced
from pipelines.doctor.cluster import (
    REPORT,
    Carried,
    ClusterReport,
    NodeReport,
    Together,
    assess_all_reduce,
    assess_clocks,
    assess_throughput,
    assess_versions,
    between_nodes,
    of_node,
    own_problems,
    parse_report,
)
from pipelines.doctor.examination import examine
from pipelines.doctor.findings import FaultError, Finding, State
from pipelines.doctor.node import Node
from pipelines.recipe.recipe_files import load_recipe
from tests.unit.doctor.recordings import told

GIB = 1 << 30
FACTS = {"ray": "2.60.0", "python": "3.11.9", "torch": "2.13.0", "cuda": "13.0", "driver": None}
SIXTEEN = Together(nodes=2, processes=16, on_gpu=True)


def node(name: str, offset: float = 0.0, **facts: str) -> NodeReport:
    finding = Finding("GPUs", State.OK, "8 x H100", "why", "")
    return NodeReport(
        name=name, offset=offset, uncertainty=0.01, facts=FACTS | facts, findings=[finding]
    )


def reduced(gib: float, *, right: bool = True, **values: object) -> Together:
    outcome = Reduced(right=right, bandwidth=gib * GIB)
    return SIXTEEN.model_copy(update={"outcome": outcome, **values})


def test_a_report_comes_through_the_jobs_log():
    report = ClusterReport(
        nodes=[node("10.0.0.1"), node("10.0.0.2", offset=0.5)],
        together=reduced(30),
        planes=[Carried(plane="users", rate=1e8, slowest="a to b")],
    )
    log = f"INFO worker.py: connected\n{REPORT}{report.model_dump_json()}\nbye\n"
    assert parse_report(log) == report


def test_only_what_not_all_nodes_have_is_a_nodes_own_problem():
    disk, clock = (Finding(name, State.PROBLEM, "bad", "why", "fix") for name in ("disk", "clock"))
    one, other = (node(name) for name in ("a", "b"))
    bad = one.model_copy(update={"findings": [*one.findings, disk, clock]})
    also = other.model_copy(update={"findings": [clock]})
    assert own_problems([bad, also]) == [["disk: bad"], []]
    assert own_problems([bad, other]) == [["disk: bad", "clock: bad"], []]
    assert own_problems([bad]) == [[]]


def test_who_takes_no_more_work_says_so_first():
    report = node("a")
    assert of_node(report) == report.findings
    first, *others = of_node(report.model_copy(update={"is_fenced": True}))
    assert (first.check, first.state) == ("fence", State.WARNING)
    assert others == report.findings


def test_a_log_without_report_is_told():
    with pytest.raises(FaultError, match="no report"):
        parse_report("Traceback (most recent call last):\n")


def test_a_report_of_another_version_is_told():
    with pytest.raises(FaultError, match="the job's report could not be read"):
        parse_report(f'{REPORT}{{"nodes": 7}}\n')


def test_a_cluster_that_takes_no_job_is_told(monkeypatch):
    """With nodes that answer, and then a head that is gone."""
    monkeypatch.setattr("pipelines.doctor.examination.run_checks", lambda _: [])
    monkeypatch.setattr("pipelines.doctor.examination.ray_nodes", lambda: 2)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{free_port()}")
    (fault,) = examine(load_recipe("debug"))["between nodes"]
    assert fault.state == State.PROBLEM
    assert fault.saw.startswith("no job could be run on the nodes: ")


def test_nodes_that_are_alike_are_one_line():
    ((state, saw),) = told(assess_versions([node("a"), node("b")]))
    assert state == "ok"
    assert saw == "2 nodes alike: ray 2.60.0, python 3.11.9, torch 2.13.0, cuda 13.0"


@pytest.mark.parametrize(
    ("fact", "state"),
    [("ray", "problem"), ("python", "problem"), ("torch", "problem"), ("driver", "warning")],
)
def test_a_node_that_differs_is_named(fact, state):
    odd = node("d", **{fact: "other"})
    ((found, saw),) = told(assess_versions([node("a"), node("b"), node("c"), node("e"), odd]))
    assert found == state
    assert saw.startswith(f"{fact}: {FACTS[fact] or 'none'} on a, b, c and 1 more; other on d")


@pytest.mark.parametrize(("skew", "state"), [(0.05, "ok"), (0.5, "warning"), (120.0, "problem")])
def test_clocks_apart(skew, state):
    reports = [node("a", -skew / 2), node("b", skew / 2), node("c")]
    ((found, saw),) = told(assess_clocks(reports))
    assert found == state
    assert state == "ok" or saw == f"b is {skew:.3f} s ahead of a"


@pytest.mark.parametrize(
    ("found", "state", "saw"),
    [
        (reduced(46), "ok", "over 16 GPUs of 2 nodes: bus bandwidth 46 GiB/s"),
        (reduced(3), "warning", "the GPU plane's class is 20-40"),
        (reduced(46, right=False), "problem", "gave a wrong sum"),
        (reduced(0.1, on_gpu=False), "ok", "over 16 processes (gloo) of 2 nodes"),
        (
            SIXTEEN.model_copy(update={"fault": "an all-reduce did not end in 60 s"}),
            "problem",
            "did not end in 60 s",
        ),
    ],
)
def test_an_all_reduce_over_nodes(found, state, saw):
    ((told_state, words),) = told(assess_all_reduce(found))
    assert told_state == state
    assert saw in words


@pytest.mark.parametrize(
    ("plane", "gib", "state"),
    [
        ("inference", 2, "ok"),
        ("inference", 0.5, "warning"),
        ("users", 0.11, "ok"),
        ("storage", 3, "ok"),  # one process's TCP says nothing of RDMA
        ("users", None, "problem"),
    ],
)
def test_what_a_plane_carried(plane, gib, state):
    rate = None if gib is None else gib * GIB
    found = Carried(plane=plane, rate=rate, slowest="a to b", fault="" if rate else "refused")
    assert told(assess_throughput(found))[0][0] == state


def test_all_is_told_with_its_reason():
    report = ClusterReport(
        nodes=[node("a"), node("b")],
        together=reduced(30),
        planes=[Carried(plane="users", rate=GIB, slowest="a to b")],
    )
    found = between_nodes(report)
    assert [each.check for each in found] == [
        "versions over nodes",
        "clocks over nodes",
        "all-reduce over nodes",
        "planes between nodes",
    ]
    assert all(each.why for each in found)


def test_what_the_job_asks_of_a_node_it_can_do():
    """As the actor does it, without Ray around it."""
    ours = Node()
    facts, findings = ours.examine(load_recipe("debug"))
    assert facts["torch"]
    assert {finding.check for finding in findings} >= {"open files", "all-reduce", "disk speed"}
    assert ours.devices() >= 0
    address = ours.listen("lo")
    assert address is not None
    assert isinstance(ours.send(address), float)
    ours.hush()
    assert isinstance(ours.send(address), str)
    assert ours.listen("no-such-interface") is None
    alone = Group(address=f"tcp://127.0.0.1:{free_port()}", world=1, first=0, here=1, on_gpu=False)
    outcome = ours.reduce(alone)
    assert isinstance(outcome, Reduced), outcome
    assert outcome.right
