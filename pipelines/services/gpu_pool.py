"""Airflow's pool that makes runs queue for GPUs rather than fight over them.

A slot is one job that trains or evaluates, whatever its size, from its submission to its end. There
are as many as jobs of two workers have room in the cluster at a time; another number is set by
`PENSTOCK_GPU_JOBS`, or by a person in Airflow, whose pool is left as it is.
"""

import os

import httpx

from pipelines.core.errors import UserError
from pipelines.core.settings import GPU_POOL, Settings
from pipelines.orchestration.jobs_api import TokenFile
from pipelines.services.airflow_api import AirflowApi

VARIABLE = "PENSTOCK_GPU_JOBS"
_WORKERS_A_JOB = 2  # of the default recipe
_DESCRIPTION = "Tasks that compute on GPUs, deferred ones too; a slot is one job"


def ensure_pool(settings: Settings) -> None:
    """Make the pool where it is missing; set its size where the environment names one.

    Raises:
        UserError: the environment names no number of jobs.
    """
    given = os.environ.get(VARIABLE)
    if given is not None and (not given.isdigit() or int(given) < 1):
        raise UserError(f"{VARIABLE}={given!r}: not a number of jobs; 1 or more run at a time")
    airflow = AirflowApi(settings)
    slots = airflow.pool_slots(GPU_POOL)
    if slots is None:
        airflow.make_pool(GPU_POOL, int(given or _room(settings)), _DESCRIPTION)
    elif given and slots != int(given):
        airflow.set_pool_slots(GPU_POOL, int(given))


def _room(settings: Settings) -> int:
    """How many jobs the cluster has room for: by its GPUs, or by its CPUs where it has none."""
    answer = httpx.get(
        f"{settings.ray_url}/api/v0/nodes",
        params={"limit": 10_000, "detail": True},
        auth=TokenFile(settings.ray_token_path),
        timeout=30.0,
    )
    nodes = answer.raise_for_status().json()["data"]["result"]["result"]
    alive = [node["resources_total"] for node in nodes if node["state"] == "ALIVE"]
    total = {name: sum(node.get(name, 0) for node in alive) for name in ("GPU", "CPU")}
    return max(1, int(total["GPU"] or total["CPU"]) // _WORKERS_A_JOB)
