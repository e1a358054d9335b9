"""A training run's facts about its machine, kept in the workspace and in its MLflow run."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from pipelines.core.storage import write_json
from pipelines.parallel.process_group import rank
from pipelines.run.records import MACHINE
from pipelines.stages.plan_check import PLAN, beside_measured, bound_beside_reported
from pipelines.tracking.tracked_run import TrackedRun
from pipelines.training import machine_report, metrics
from pipelines.training.metrics import StepMetrics
from pipelines.training.trainer import Trainer

DIAGNOSTICS = "diagnostics"  # not among the outputs, because it differs in every run
EXPERTS = "expert_shares.json"
DENOMINATOR_TAG = "penstock.mfu_denominator"
BOUND_TAG = "penstock.bound_by"
PREDICTED_BOUND_TAG = "penstock.bound_by_predicted"

_log = logging.getLogger(__name__)


def describe(
    trainer: Trainer, tags: Mapping[str, str], workspace: Path, tracked: TrackedRun
) -> None:
    """Report the machine before the first step, on rank 0, and set the run's tags on all ranks."""
    tracked.later(partial(tracked.set_tags, dict(tags)))
    if rank() != 0:
        return
    hardware = trainer.meter.hardware
    facts = machine_report.machine_report(trainer.mesh, hardware)
    _log.info("%s", machine_report.summary(facts))
    path = workspace / MACHINE
    write_json(path, facts)
    tracked.later(partial(tracked.set_tags, {DENOMINATOR_TAG: hardware.name}))
    tracked.later(partial(tracked.log_artifact, path, DIAGNOSTICS))


def conclude(points: Sequence[StepMetrics], workspace: Path, tracked: TrackedRun) -> None:
    """Report at the end what limited the run and how right its plan was; keep traces (rank 0)."""
    if rank() != 0 or not points:
        return
    bound, line = metrics.summary(points)
    _log.info("%s", line)
    tags = {BOUND_TAG: bound}
    speeds = [point.tokens_per_second for point in points]
    results = beside_measured(workspace, speeds, points[-1].memory_bytes)
    if told := bound_beside_reported(workspace, metrics.most_bound_by(points)):
        tags[PREDICTED_BOUND_TAG], hit = told
        results["plan/bound_by_hit"] = float(hit)
        _log.info("planned: bound by %s", told[0])
    tracked.set_tags(tags)
    tracked.log_results(results)
    if (planned := workspace / PLAN).is_file():
        tracked.log_artifact(planned, DIAGNOSTICS)
    if shares := points[-1].expert_shares:
        path = workspace / DIAGNOSTICS / EXPERTS
        write_json(path, {"step": points[-1].step, "shares_by_layer": shares})
        tracked.log_artifact(path, DIAGNOSTICS)
    traces = workspace / DIAGNOSTICS / "profile"
    if traces.is_dir():
        tracked.log_artifact(traces, f"{DIAGNOSTICS}/profile")
