"""Several nodes: the report of the job, and what only shows between them."""

import json

import pytest

from pipelines.doctor.cluster import (
    REPORT,
    NodeReport,
    as_json,
    between_nodes,
    judge_clocks,
    judge_versions,
    parse_report,
)
from pipelines.doctor.findings import FaultError, Finding, State
from tests.unit.doctor.recordings import told

FACTS = {"ray": "2.60.0", "python": "3.11.9", "torch": "2.13.0", "cuda": "13.0", "driver": None}


def node(name: str, offset: float = 0.0, **facts: str) -> NodeReport:
    finding = Finding("GPUs", State.OK, "8 x H100", "why", "")
    return NodeReport(
        name=name, offset=offset, uncertainty=0.01, facts=FACTS | facts, findings=[finding]
    )


def test_a_report_comes_through_the_jobs_log():
    reports = [node("10.0.0.1"), node("10.0.0.2", offset=0.5)]
    log = f"INFO worker.py: connected\n{REPORT}{json.dumps(as_json(reports))}\nbye\n"
    assert parse_report(log) == reports


def test_a_log_without_report_is_told():
    with pytest.raises(FaultError, match="no report"):
        parse_report("Traceback (most recent call last):\n")


def test_nodes_that_are_alike_are_one_line():
    ((state, saw),) = told(judge_versions([node("a"), node("b")]))
    assert (state, saw) == (
        "ok",
        "2 nodes alike: ray 2.60.0, python 3.11.9, torch 2.13.0, cuda 13.0",
    )


@pytest.mark.parametrize(
    ("fact", "state"),
    [("ray", "problem"), ("python", "problem"), ("torch", "problem"), ("driver", "warning")],
)
def test_a_node_that_differs_is_named(fact, state):
    odd = node("d", **{fact: "other"})
    ((found, saw),) = told(judge_versions([node("a"), node("b"), node("c"), node("e"), odd]))
    assert found == state
    assert saw.startswith(f"{fact}: {FACTS[fact] or 'none'} on a, b, c and 1 more; other on d")


@pytest.mark.parametrize(("skew", "state"), [(0.05, "ok"), (0.5, "warning"), (120.0, "problem")])
def test_clocks_apart(skew, state):
    reports = [node("a", -skew / 2), node("b", skew / 2), node("c")]
    ((found, saw),) = told(judge_clocks(reports))
    assert found == state
    assert state == "ok" or saw == f"b is {skew:.3f} s ahead of a"


def test_both_are_told_with_their_reasons():
    found = between_nodes([node("a"), node("b")])
    assert [each.check for each in found] == ["versions over nodes", "clocks over nodes"]
    assert all(each.why for each in found)
