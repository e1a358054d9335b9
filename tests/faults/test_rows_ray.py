"""Rows 7 and 8: a node of Ray's cluster dies, or its head and so the cluster."""

import pytest

from pipelines.run.records import EvaluateRecord
from tests.faults.nodes import second_node
from tests.faults.pipeline_run import PipelineRun
from tests.faults.processes import kill, kill_tree, service

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

NEXT_STEPS = 20


def test_row_07_a_node_of_two(scenario, reference):
    """Training goes on with the worker that is left."""
    with second_node(scenario.platform) as node:
        run = scenario.start(resources__workers=[1, 2])
        run.wait_for_step()
        at = run.step
        with run.fault("node lost"):
            kill(node.raylet)
        scenario.ends_well(run)
    scenario.holds(same_samples(run, reference))
    scenario.holds(close_losses(run, reference, at))


def test_row_07_a_node_of_two_and_room_elsewhere(scenario, reference):
    """Two workers are a must, and the head has room for both again: the same bits."""
    with second_node(scenario.platform) as node:
        run = scenario.start()
        run.wait_for_step()
        kill(node.raylet)
        step = run.step
    with run.fault("node lost", lambda: run.step > step):
        pass
    scenario.ends_well(run, like=reference)


def test_row_08_the_ray_head(scenario, reference):
    run = scenario.start()
    run.wait_for_step()
    with run.fault("cluster lost"):
        kill_tree(service(run.platform, "ray"))
    scenario.ends_well(run, like=reference)
    assert len(scenario.watch.seen(run, "train")) >= 1  # the new cluster knows nothing of the old


def same_samples(run: PipelineRun, reference: PipelineRun) -> str:
    """Of every optimizer step, by the hash in the history."""
    ours, theirs = ([point["samples"] for point in each.history] for each in (run, reference))
    assert ours == theirs
    return "the same samples in each step"


def close_losses(run: PipelineRun, reference: PipelineRun, at: int) -> str:
    """Within the reordering of sums: 1e-4 over the next steps, 1% of the held-out loss."""
    for mine, other in zip(run.history, reference.history, strict=True):
        if at < mine["step"] <= at + NEXT_STEPS:
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
    ours, theirs = (EvaluateRecord.read(each.workspace) for each in (run, reference))
    assert ours.bits_per_byte == pytest.approx(theirs.bits_per_byte, rel=0.01)
    return f"losses within 1e-4 over {NEXT_STEPS} steps, held-out loss within 1%"
