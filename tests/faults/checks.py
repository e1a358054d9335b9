"""What must hold of a run that was hurt: the same weights, and each thing there once."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from pipelines.core.settings import Settings
from pipelines.platform.dag_runs import DAG
from pipelines.run.logbook import PAGE, Kind, read_logbook
from pipelines.run.records import RegisterRecord
from pipelines.tracking.tracked_run import DAG_RUN_TAG
from tests.faults.pipeline_run import LOG_EVERY, PipelineRun

LIVE = ("PENDING", "RUNNING")
# What a fault leaves in a logbook; one may not look like two.
FAULTS: tuple[Kind, ...] = (
    "preemption",
    "worker lost",
    "node lost",
    "driver lost",
    "cluster lost",
    "task lost",
    "service lost",
    "storage",
    "clock",
    "human decision",
)
_POLL_S = 0.3


class JobsWatch(threading.Thread):
    """Looks at Ray's jobs all the time.

    Attributes:
        doubled: Tasks that had two live jobs at once.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(daemon=True)
        self._client = httpx.Client(base_url=settings.ray_url, timeout=5, trust_env=False)
        self._token = settings.ray_token_path.read_text(encoding="utf-8").strip()
        self._over = threading.Event()
        self._seen: dict[tuple[str, str], list[str]] = {}
        self.doubled: list[tuple[str, ...]] = []

    def run(self) -> None:
        while not self._over.wait(_POLL_S):
            live: dict[tuple[str, str], list[str]] = {}
            for job in self.jobs():
                metadata = job.get("metadata") or {}
                if metadata.get("dag_id") != DAG:
                    continue
                task = metadata["dag_run_id"], metadata["task_id"]
                seen = self._seen.setdefault(task, [])
                if job["submission_id"] not in seen:
                    seen.append(job["submission_id"])
                if job["status"] in LIVE:
                    live.setdefault(task, []).append(job["submission_id"])
            self.doubled += [(*task, *ids) for task, ids in live.items() if len(ids) > 1]

    def jobs(self) -> list[dict[str, Any]]:
        """All that Ray knows now; none while its head is away."""
        try:
            headers = {"Authorization": f"Bearer {self._token}"}
            answer = self._client.get("/api/jobs/", headers=headers).raise_for_status()
        except httpx.HTTPError:
            return []
        found: list[dict[str, Any]] = answer.json()
        return found

    def live(self, run: PipelineRun, task_id: str) -> list[str]:
        """The live jobs of a task now."""
        return [
            job["submission_id"]
            for job in self.jobs()
            if job["status"] in LIVE
            and (job.get("metadata") or {}).get("dag_run_id") == run.run_id
            and job["metadata"]["task_id"] == task_id
        ]

    def seen(self, run: PipelineRun, task_id: str) -> list[str]:
        """All jobs that a task ever had, oldest first."""
        return self._seen.get((run.run_id, task_id), [])

    def used_cpus(self) -> float:
        """How many CPUs Ray has promised to somebody."""
        headers = {"Authorization": f"Bearer {self._token}"}
        answer = self._client.get("/api/cluster_status", headers=headers).raise_for_status()
        usage = answer.json()["data"]["clusterStatus"]["loadMetricsReport"]["usage"]
        used: float = usage["CPU"][0]
        return used

    def stop(self, run: PipelineRun) -> None:
        """End all jobs of a run."""
        headers = {"Authorization": f"Bearer {self._token}"}
        for job in self.jobs():
            if (job.get("metadata") or {}).get("dag_run_id") == run.run_id:
                self._client.post(f"/api/jobs/{job['submission_id']}/stop", headers=headers)

    def close(self) -> None:
        """No more looks."""
        self._over.set()
        self.join()
        self._client.close()


def same_weights(run: PipelineRun, reference: PipelineRun) -> str:
    """Bit for bit."""
    ours, theirs = run.trained, reference.trained
    assert ours.model_hash == theirs.model_hash, (
        f"the weights differ from those without the fault: {ours.metrics}, {theirs.metrics}"
    )
    return "weights identical"


def one_job_at_a_time(run: PipelineRun, watch: JobsWatch) -> str:
    """For each task."""
    doubled = [each for each in watch.doubled if each[0] == run.run_id]
    assert not doubled, f"two live jobs at once: {doubled}"
    count = len(watch.seen(run, "train"))
    return f"one live job at a time ({count} for train)"


def one_mlflow_run(run: PipelineRun) -> str:
    """For the DAG run, and ended well; each step of each curve is in it once."""
    from pipelines.tracking.mlflow_client import open_client

    client = open_client(run.platform.settings.mlflow_url)
    experiments = [each.experiment_id for each in client.search_experiments()]
    found = client.search_runs(experiments, f"tags.`{DAG_RUN_TAG}` = '{run.run_id}'")
    assert len(found) == 1, f"{len(found)} MLflow runs for one DAG run"
    assert found[0].info.status == "FINISHED"
    wanted = Counter(range(LOG_EVERY, run.steps + 1, LOG_EVERY))
    for curve in ("train/loss", "train/tokens_per_second"):
        points = client.get_metric_history(found[0].info.run_id, curve)
        logged = Counter(point.step for point in points)
        assert logged == wanted, (
            f"{curve}: steps {sorted((wanted - logged).elements())} are missing, "
            f"{sorted((logged - wanted).elements())} were logged again"
        )
    return "one MLflow run, each step once"


def one_version(run: PipelineRun) -> str:
    """Of the run's own model name: its gate decided once."""
    from pipelines.tracking.mlflow_client import open_client

    client = open_client(run.platform.settings.mlflow_url)
    versions = client.search_model_versions(f"name = '{run.model}'")
    assert [each.run_id for each in versions] == [run.facts.mlflow_run_id]
    verdict = RegisterRecord.read(run.workspace)
    assert verdict.verdict.decision == "promoted"
    assert verdict.model is not None
    assert verdict.model.aliases == ("champion",)
    return "one model version"


def told_once(run: PipelineRun) -> str:
    """Each fault, and no other, is in the logbook, and in its page among the artifacts."""
    from pipelines.tracking.mlflow_client import open_client

    entries = read_logbook(run.workspace)
    counts = Counter(entry.kind for entry in entries)
    found = {kind: counts[kind] for kind in FAULTS if counts[kind]}
    listed = "\n".join(entry.model_dump_json(exclude_none=True) for entry in entries)
    assert found == run.expected, f"expected {run.expected} in the logbook, which has\n{listed}"
    keys = [entry.key for entry in entries]
    assert len(keys) == len(set(keys)), listed
    client = open_client(run.platform.settings.mlflow_url)
    assert run.facts.mlflow_run_id is not None
    page = Path(client.download_artifacts(run.facts.mlflow_run_id, PAGE))
    rows = [line.split("|") for line in page.read_text(encoding="utf-8").splitlines()]
    shown = Counter(row[2].strip() for row in rows[4:])  # after the title and the columns' heads
    assert shown == counts, f"the page among the artifacts shows {shown}, the logbook has {counts}"
    return "each fault once in the logbook"
