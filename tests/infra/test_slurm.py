"""penstock.sbatch under a real Slurm of three nodes, as docs/cluster.md tells users to use it.

Ray is real, with tokens and TLS between hosts that have a network each, and so is the MLflow on the
login node; the model is tiny.
"""

import json
import sqlite3
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.core.settings import PROJECT
from tests.infra.machine import needs
from tests.infra.runbook import commands
from tests.infra.slurm_cluster import NAMES, SlurmCluster, slurm_cluster

pytestmark = [pytest.mark.infra, pytest.mark.timeout(2400)]
START_S = 600  # at most, until a job trains, on a machine that is busy
TRAIN = (
    "infra/slurm/penstock.sbatch python -m ray_jobs.train --recipe debug --set train.log_every=1"
)
WITHOUT_GPUS = {"SBATCH_GPUS_PER_NODE": "0"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Three nodes and, on the login node, MLflow."""
    needs("slurmctld", "slurmd", "sbatch", "munged")
    if PROJECT.is_relative_to("/tmp"):
        pytest.skip("each host has a /tmp of its own, so the project must lie elsewhere")
    with slurm_cluster() as slurm:
        url = f"http://{slurm.address}:5000"
        slurm.environment["MLFLOW_TRACKING_URI"] = url
        slurm.environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # as in our images
        mlflow = [str(Path(sys.executable).with_name("mlflow")), "server", "--workers=1"]
        mlflow += [f"--host={slurm.address}", "--port=5000", f"--allowed-hosts={slurm.address}:*"]
        mlflow += [f"--backend-store-uri=sqlite:///{slurm.shared}/mlflow.db"]
        slurm.start_server(
            [*mlflow, f"--default-artifact-root={slurm.shared}/artifacts"], "mlflow.log"
        )
        slurm.command(
            f"curl --silent --fail --retry 100 --retry-delay 1 --retry-all-errors {url}/health"
        )
        yield slurm


def nothing_left(cluster: SlurmCluster, job: str) -> None:
    """On no node a process or a file, and no secret where the nodes share their files."""
    deadline = time.monotonic() + 20  # for Slurm's own processes, which end after the job
    while left := {name: found for name in NAMES if (found := cluster.left_on(name))}:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)
    assert not (cluster.shared / "home" / "slurm" / job).exists()


def workspace(cluster: SlurmCluster, job: str) -> Path | None:
    """Where a job works, once it has said so."""
    lines = [line for line in cluster.output(job).splitlines() if line.startswith("workspace ")]
    return Path(lines[-1].split(maxsplit=1)[1]) if lines else None


def step(cluster: SlurmCluster, job: str) -> int:
    """The last step that a job has told."""
    place = workspace(cluster, job)
    history = place / "checkpoints" / "history.jsonl" if place else None
    lines = history.read_text().splitlines() if history and history.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def logbook(cluster: SlurmCluster, job: str, kind: str) -> list[dict[str, Any]]:
    """What befell a job's training, of one kind."""
    place = workspace(cluster, job)
    file = place / "logbook.jsonl" if place else None
    lines = file.read_text().splitlines() if file and file.exists() else []
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def in_mlflow(cluster: SlurmCluster, job: str) -> list[tuple[str, str]]:
    """The runs of a job's workspace, with their states."""
    place = workspace(cluster, job)
    assert place is not None
    with sqlite3.connect(cluster.shared / "mlflow.db") as database:
        return database.execute(
            "SELECT run_uuid, status FROM runs WHERE name LIKE ? || '-%'", (place.name,)
        ).fetchall()


def steps_in_mlflow(cluster: SlurmCluster, run: str, key: str) -> list[int]:
    """The steps of a curve."""
    with sqlite3.connect(cluster.shared / "mlflow.db") as database:
        rows = database.execute(
            "SELECT step FROM metrics WHERE run_uuid = ? AND key LIKE ? ORDER BY step", (run, key)
        )
        return [number for (number,) in rows]


def test_a_first_run_as_the_runbook_tells(cluster: SlurmCluster) -> None:
    job = cluster.submit(
        commands("Slurm", "Day 1: the first run"),
        SBATCH_ACCOUNT="research",
        SBATCH_PARTITION="shared",
        SBATCH_TIMELIMIT="30",
        **WITHOUT_GPUS,
    )
    asked = cluster.state(job)
    assert asked["Account"] == "research"
    assert asked["Partition"] == "shared"
    assert asked["TimeLimit"] == "00:30:00"
    assert asked["NumNodes"].startswith("3")
    assert cluster.ended(job, START_S) == "COMPLETED", cluster.output(job)
    ((run, status),) = in_mlflow(cluster, job)
    assert status == "FINISHED"
    assert steps_in_mlflow(cluster, run, "train/loss")[-1] == 20
    (start,) = logbook(cluster, job, "start")
    assert start["done"] == "trains on 3 workers"  # a node has one CPU
    nothing_left(cluster, job)
    logs = cluster.shared / "home" / "slurm" / "logs" / f"{job}.0"
    assert {path.name for path in logs.iterdir()} == {f"{name}.tar.gz" for name in NAMES}


def test_one_run_over_a_lost_node_the_time_limit_and_scancel(cluster: SlurmCluster) -> None:
    job = cluster.submit(
        f"sbatch --nodes=3 --time=60 --signal=B:TERM@120 {TRAIN} --set resources.workers=3 "
        "--set train.steps=100000 --set train.checkpoint_every=10 --set seed=2",
        **WITHOUT_GPUS,
    )
    cluster.until(lambda: step(cluster, job) > 25, "step", job, START_S)
    cluster.lose("n3")
    cluster.until(lambda: cluster.state(job)["Restarts"] == "1", "requeue", job, 120)
    reached = step(cluster, job)
    cluster.boot("n3")
    cluster.until(lambda: step(cluster, job) > reached, "step after the loss", job, START_S)
    (resumed,) = logbook(cluster, job, "resume")
    assert 20 <= resumed["step"] <= reached
    assert resumed["step"] % 10 == 0  # of the last checkpoint

    hours, minutes, _ = map(int, cluster.state(job)["RunTime"].split(":"))
    cluster.command(f"scontrol update jobid={job} timelimit={60 * hours + minutes + 3}")
    cluster.until(lambda: cluster.state(job)["Restarts"] == "2", "second requeue", job, 180)
    cluster.command(f"scontrol update jobid={job} timelimit=60")
    (noticed,) = logbook(cluster, job, "preemption")
    assert "the job's time ends" in noticed["cause"]
    cluster.until(lambda: len(logbook(cluster, job, "resume")) == 2, "resumption", job, START_S)
    assert logbook(cluster, job, "resume")[1]["step"] == noticed["step"]  # not one is lost
    cluster.until(lambda: step(cluster, job) > noticed["step"] + 5, "step", job, START_S)

    cluster.command(f"scancel {job}")
    assert cluster.ended(job, 60) == "CANCELLED"
    nothing_left(cluster, job)
    ((run, status),) = in_mlflow(cluster, job)  # all three lives are one run
    assert status == "FAILED", cluster.output(job)[-5000:]
    for node in range(3):  # a worker on each, which tells of its node
        assert steps_in_mlflow(cluster, run, f"system/node-{node}/%memory%")
    steps = steps_in_mlflow(cluster, run, "train/loss")
    assert len(steps) == len(set(steps))


def test_two_jobs_on_one_node(cluster: SlurmCluster) -> None:
    jobs = [
        cluster.submit(
            f"sbatch --nodes=1 --nodelist=n1 --partition=shared --oversubscribe {TRAIN} "
            f"--set resources.workers=1 --set train.steps=1000 --set seed={seed}",
            **WITHOUT_GPUS,
        )
        for seed in (3, 4)
    ]
    both = "both at once"
    cluster.until(lambda: all(step(cluster, job) > 0 for job in jobs), both, jobs[1], START_S)
    assert [cluster.state(job)["JobState"] for job in jobs] == ["RUNNING", "RUNNING"]
    cluster.command(f"scancel {jobs[0]}")
    assert cluster.ended(jobs[0], 60) == "CANCELLED"
    assert not any(f"penstock-{jobs[0]}" in each for each in cluster.left_on("n1"))
    reached = step(cluster, jobs[1])
    cluster.until(lambda: step(cluster, jobs[1]) > reached, "step", jobs[1], 60)

    drain = commands("Slurm", "Day 2: drain a node")
    cluster.command(drain, NODE="n1", JOB=jobs[1])
    cluster.until(lambda: cluster.state(jobs[1])["Restarts"] == "1", "requeue", jobs[1], 120)
    (noticed,) = logbook(cluster, jobs[1], "preemption")
    assert noticed["step"] > reached
    cluster.command(f"scancel {jobs[1]}; scontrol update nodename=n1 state=resume")
    assert cluster.ended(jobs[1], 60) == "CANCELLED"
    nothing_left(cluster, jobs[1])


def test_a_start_that_fails_leaves_rays_logs_and_nothing_else(cluster: SlurmCluster) -> None:
    job = cluster.submit(f"sbatch --nodes=3 {TRAIN}", **WITHOUT_GPUS)
    logs = "ls /tmp/penstock-*/ray/session_latest/logs/gcs_server.out || true"
    cluster.until(lambda: "gcs_server" in cluster.on("n1", logs), "Ray", job, START_S)
    cluster.on("n1", "pkill --signal TERM --full 'ray start --block'")
    assert cluster.ended(job, 120) == "FAILED"
    assert "error: Ray failed on n1" in cluster.output(job)
    nothing_left(cluster, job)
    kept = cluster.shared / "home" / "slurm" / "logs" / f"{job}.0" / "n1.tar.gz"
    with tarfile.open(kept) as archive:
        assert any(name.endswith("/gcs_server.out") for name in archive.getnames())


def test_a_users_error_ends_the_job_by_its_exit_code(cluster: SlurmCluster) -> None:
    job = cluster.submit(f"sbatch --nodes=1 {TRAIN} --set train.step=5", **WITHOUT_GPUS)
    assert cluster.ended(job, START_S) == "FAILED"
    assert cluster.state(job)["ExitCode"] == "2:0"
    assert "train.step" in cluster.output(job)
