"""A platform for as long as a benchmark runs: new, warm, on free ports, with the benchmarks' DAGs.

Its home is new too, so that nothing comes out of a cache that the benchmark did not fill.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from pipelines.core.machine import free_port
from pipelines.core.settings import PROJECT, Settings, load_settings
from pipelines.platform.airflow_api import AirflowApi
from pipelines.platform.environment import client_variables

DAGS = PROJECT / "tests" / "benchmarks" / "dags"
PORTS = ("AIRFLOW", "MLFLOW", "RAY", "RAY_GCS")
_FOREIGN = ("MLFLOW_TRACKING_URI", "PENSTOCK_AIRFLOW_URL", "RAY_API_SERVER_ADDRESS")
_LOCAL_BUNDLE = "airflow.dag_processing.bundles.local.LocalDagBundle"


@contextmanager
def local_platform(folder: Path) -> Iterator[dict[str, Any]]:
    """Airflow, Ray and MLflow; a contender inherits the environment by which it finds them."""
    home = folder / "home"
    shutil.rmtree(home, ignore_errors=True)
    for variable in (*_FOREIGN, "RAY_AUTH_TOKEN_PATH"):
        os.environ.pop(variable, None)
    os.environ["PENSTOCK_HOME"] = str(home)
    os.environ |= {f"PENSTOCK_{name}_PORT": str(free_port()) for name in PORTS}
    bundles = [
        {"name": name, "classpath": _LOCAL_BUNDLE, "kwargs": {"path": str(path)}}
        for name, path in (("dags-folder", PROJECT / "dags"), ("benchmarks", DAGS))
    ]
    os.environ |= client_variables(load_settings())
    os.environ["AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST"] = json.dumps(bundles)
    _penstock("up")
    try:
        yield {}
    finally:
        _penstock("down")


def connect(*dag_ids: str) -> tuple[Settings, AirflowApi]:
    """In a contender: the platform's settings, and its Airflow, ready for runs of these DAGs."""
    settings = load_settings()
    airflow = AirflowApi(settings)
    for dag_id in dag_ids:
        airflow.wait_for_dag(dag_id)
        airflow.unpause(dag_id)
    return settings, airflow


def seconds_of_run(airflow: AirflowApi, dag_id: str, run_id: str) -> float:
    """From a run's queueing to its success, which is waited for."""
    run = wait_for_run(airflow, dag_id, run_id)
    return seconds_of(run["end_date"]) - seconds_of(run["queued_at"])


def wait_for_run(airflow: AirflowApi, dag_id: str, run_id: str) -> dict[str, Any]:
    """What Airflow says of a run once it has succeeded."""
    while (run := airflow.run(dag_id, run_id))["state"] not in ("success", "failed"):
        time.sleep(1)
    if run["state"] != "success":
        raise SystemExit(f"{dag_id} {run_id} failed")
    return run


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 300) -> float:
    """The time at which it holds, seconds since the epoch, to some ten milliseconds."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            raise SystemExit(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.01)
    return time.time()


def seconds_of(stamp: str) -> float:
    """Airflow's time as seconds since the epoch."""
    return datetime.fromisoformat(stamp).timestamp()


def _penstock(command: str) -> None:
    subprocess.run([Path(sys.prefix) / "bin" / "penstock", command], stdout=2, check=True)
