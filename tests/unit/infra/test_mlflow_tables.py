"""MLflow's tables are made by one job, for which its servers wait."""

import os
import subprocess
import sys
from pathlib import Path

from pipelines.core.settings import PROJECT
from pipelines.platform.environment import BIN
from tests.unit.infra.manifests import pods, render

IMAGES = PROJECT / "infra" / "images"


def test_servers_wait_for_the_tables_that_the_job_makes(tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "PATIENCE_S": "0",
    }
    wait = [sys.executable, IMAGES / "wait-for-mlflow-tables.py"]
    early = subprocess.run(wait, env=environment, capture_output=True, text=True)
    assert early.returncode == 1
    assert "server/auth/db/migrations" in early.stderr and "store/db_migrations" in early.stderr
    prepare = [IMAGES / "prepare-mlflow.sh"]
    subprocess.run(prepare, env=environment, check=True, capture_output=True)
    subprocess.run(wait, env=environment, check=True)


def test_each_part_waits_for_its_job() -> None:
    templates = {name: pod["spec"] for name, pod in pods(render()).items()}
    first = {
        name: [each.get("args") for each in spec.get("initContainers", [])]
        for name, spec in templates.items()
    }
    assert first.pop("mlflow") == [["python", "infra/images/wait-for-mlflow-tables.py"]]
    checks = [["airflow", "db", "check-migrations", "--migration-wait-timeout=600"]]
    for name in ("api-server", "scheduler", "dag-processor", "triggerer", "reconciler"):
        assert first.pop(name) == checks
    assert first["mlflow-prepare"] == first["airflow-prepare"] == []
    (job,) = templates["mlflow-prepare"]["containers"]
    assert job["args"] == ["infra/images/prepare-mlflow.sh"]
