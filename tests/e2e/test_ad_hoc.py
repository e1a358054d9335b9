"""Training without Airflow, from a shell with `penstock env`."""

import shlex
import subprocess

from pipelines.core.settings import PROJECT
from tests.conftest import PENSTOCK

SETS = "--set train.steps=12 --set data.source.max_documents=12 --set resources.workers=1"
COMMAND = """
eval "$({penstock} env)"
ray job submit --working-dir . -- python -m ray_jobs.train --recipe debug {sets}
"""


def test_a_ray_job_trains_and_logs_to_mlflow(platform, platform_variables):
    from pipelines.tracking.mlflow_client import open_client

    done = subprocess.run(
        ["bash", "-c", COMMAND.format(penstock=shlex.quote(str(PENSTOCK)), sets=SETS)],
        cwd=PROJECT,
        env=platform.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    client = open_client()
    experiment = client.get_experiment_by_name("debug")
    ours = "attributes.status = 'FINISHED' AND attributes.run_name LIKE 'ad-hoc-%'"
    (run,) = client.search_runs([experiment.experiment_id], ours)
    assert len(client.get_metric_history(run.info.run_id, "train/loss")) >= 5
