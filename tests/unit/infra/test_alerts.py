"""The alert rules, tried by promtool: each fires where it should, not where it should not."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.core.settings import PROJECT
from tests.unit.infra.test_monitoring import metrics_of_airflow, metrics_of_nodes
from tests.unit.infra.test_monitoring import metrics_of_training as of_training

RULES = yaml.safe_load(
    (PROJECT / "infra" / "kubernetes" / "monitoring" / "alerts.yaml").read_text()
)["spec"]
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
HERE = 'namespace="penstock"'
HOME = f'{{{HERE}, persistentvolumeclaim="home"}}'
AVAILABLE = "kube_deployment_status_replicas_available"
READY = f'kube_pod_status_ready{{{HERE}, pod="ray-head-x7", condition="true"}}'
FAILED = f'cnpg_pg_stat_archiver_last_failed_time{{{HERE}, pod="postgres-1"}}'
ARCHIVED = f'cnpg_pg_stat_archiver_last_archived_time{{{HERE}, pod="postgres-1"}}'
BACKUP = f"barman_cloud_cloudnative_pg_io_last_available_backup_timestamp{{{HERE}}}"
EXPIRES = f'certmanager_certificate_expiration_timestamp_seconds{{{HERE}, name="ray-https"}}'
Series = dict[str, str]


def collectors(*values: int) -> Series:
    """Postgres' instances, of which each says whether it is up."""
    return {
        f'cnpg_collector_up{{{HERE}, pod="postgres-{n}"}}': f"{v}x300" for n, v in enumerate(values)
    }


def home(available: int) -> Series:
    return {
        f"kubelet_volume_stats_available_bytes{HOME}": f"{available}x300",
        f"kubelet_volume_stats_capacity_bytes{HOME}": "1000x300",
    }


def part(name: str, replicas: int) -> Series:
    return {f'{AVAILABLE}{{{HERE}, deployment="{name}"}}': f"{replicas}x300"}


def answers(good: int, bad: int) -> Series:
    """MLflow's, so many in ten minutes."""
    name = f"mlflow_http_request_total{{{HERE}, status="
    return {f'{name}"200"}}': f"0+{good}x300", f'{name}"500"}}': f"0+{bad}x300"}


# Alert: what Prometheus sees every ten minutes of 50 hours where it fires, and where it does not.
# Time begins at 0.
TRIED: dict[str, tuple[Series, Series]] = {
    "PostgresDown": (collectors(0, 0), collectors(0, 1)),
    "AirflowPartDown": (part("scheduler", 0), part("scheduler", 1) | part("mlflow", 0)),
    "MLflowDown": (part("mlflow", 0), part("mlflow", 1) | part("scheduler", 0)),
    "RayHeadDown": ({READY: "0x300"}, {READY: "1x300"}),
    "TrainingStands": (
        {'ray_penstock_train_step{run="a"}': "70x300"},
        {'ray_penstock_train_step{run="a"}': "0+1x300"},
    ),
    "HomeIsFull": (home(10), home(50)),
    "HomeFillsUp": (home(50), home(500)),
    "PostgresIsNotArchived": (
        {FAILED: "20x300", ARCHIVED: "10x300"},
        {FAILED: "10x300", ARCHIVED: "20x300"},
    ),
    "PostgresHasNoBackup": ({BACKUP: "0x300"}, {BACKUP: "0+600x300"}),
    "PostgresIsNotRedundant": (collectors(1, 0, 0), collectors(1, 1, 0)),
    "MLflowFails": (answers(60, 6), answers(60, 1)),
    "DagsAreBroken": (
        {"airflow_dag_processing_import_errors": "1x300"},
        {"airflow_dag_processing_import_errors": "0x300"},
    ),
    "TasksStarve": (
        {"airflow_scheduler_tasks_starving": "2x300"},
        {"airflow_scheduler_tasks_starving": "0x288 2x12"},  # an hour of it
    ),
    "TrainingWaitsForData": (
        {'ray_penstock_train_data_wait_share{run="a"}': "0.3x300"},
        {'ray_penstock_train_data_wait_share{run="a"}': "0.01x300"},
    ),
    "NodeDiskIsFull": (
        {'ray_node_disk_utilization_percentage{ip="10.0.0.1"}': "97x300"},
        {'ray_node_disk_utilization_percentage{ip="10.0.0.1"}': "60x300"},
    ),
    "NodesFail": ({"ray_cluster_failed_nodes": "3x300"}, {"ray_cluster_failed_nodes": "1x300"}),
    "CertificateExpires": ({EXPIRES: "200000x300"}, {EXPIRES: "9000000x300"}),
}
# Told by others than Airflow, Ray and the trainer, by their documentation.
OTHERS = re.compile(
    r"kube_\w+|kubelet_volume_stats_\w+|cnpg_\w+|mlflow_http_request_total"
    r"|barman_cloud_\w+|certmanager_\w+"
)


def case(series: Series, alert: str, fires: bool) -> dict[str, Any]:
    """One test of promtool's, which looks after 49 hours."""
    return {
        "interval": "10m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})',
                "eval_time": "49h",
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
        ],
    }


def test_an_alert_fires_where_it_should_and_nowhere_else(tmp_path: Path) -> None:
    if not shutil.which("promtool"):
        pytest.skip("no promtool is installed (on Debian: apt-get install prometheus)")
    tests = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "10m",
        "tests": [
            case(series, alert, fires)
            for alert, tried in TRIED.items()
            for series, fires in zip(tried, (True, False), strict=True)
        ],
    }
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(RULES))
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    tried = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "tests.yaml"], capture_output=True, text=True
    )
    assert tried.returncode == 0, tried.stdout + tried.stderr


def test_each_figure_is_one_that_somebody_tells() -> None:
    told = metrics_of_airflow() | metrics_of_nodes() | of_training()
    for rule in ALERTS.values():
        names = set(re.findall(r"\b[a-z]+_\w+(?=[{\s)]|$)", rule["expr"]))
        assert names, rule["alert"]
        assert {name for name in names - told if not OTHERS.fullmatch(name)} == set()


def test_each_alert_is_tried_and_says_what_it_means() -> None:
    assert ALERTS.keys() == TRIED.keys()
    runbook = (PROJECT / "docs" / "cluster.md").read_text()
    for name, rule in ALERTS.items():
        assert rule["annotations"]["summary"].endswith(".")
        assert f"`{name}`" in runbook
