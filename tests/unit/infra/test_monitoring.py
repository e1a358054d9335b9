"""Dashboards and scrapes: what a panel asks for is what somebody tells."""

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from pipelines.core.settings import PROJECT
from pipelines.training.metrics import StepMetrics
from tests.unit.infra.custom_resources import fields, list_of

FOLDER = PROJECT / "infra" / "monitoring"
COMPOSE = PROJECT / "infra" / "compose"
DASHBOARDS = sorted((FOLDER / "dashboards").glob("*.json"))
POINT = StepMetrics(
    step=10,
    last_step=40,
    tokens=1000,
    loss=2.0,
    learning_rate=1e-3,
    gradient_norm=1.0,
    steps_left_out=0,
    samples="a hash",
    step_seconds=0.1,
    tokens_per_second=1000.0,
    mfu=0.5,
    mbu=0.1,
    data_wait_share=0.01,
    communication_share=0.2,
    memory_bytes=1 << 30,
    bound_by="compute",
    bound_share=0.5,
    last=True,
)
TEXT, NUMBER = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}
SOURCE = fields({"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}})
PANEL = fields(
    {
        "id": NUMBER,
        "type": {"const": "timeseries"},
        "title": TEXT,
        "description": {"type": "string"},
        "datasource": SOURCE,
        "gridPos": fields(dict.fromkeys("xywh", NUMBER)),
        "fieldConfig": fields({"defaults": fields({"unit": TEXT}), "overrides": {"maxItems": 0}}),
        "targets": list_of(fields(dict.fromkeys(("refId", "expr", "legendFormat"), TEXT))),
    }
)
DASHBOARD = fields(
    {
        "uid": TEXT,
        "title": TEXT,
        "tags": list_of(TEXT),
        "schemaVersion": NUMBER,
        "editable": {"const": False},
        "refresh": TEXT,
        "time": fields({"from": TEXT, "to": TEXT}),
        "templating": fields({"list": list_of({"type": "object", "required": ["name", "type"]})}),
        "panels": list_of(PANEL),
    }
)


def expressions(path: Path) -> list[str]:
    panels = json.loads(path.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def named(path: Path) -> set[str]:
    """The metrics that a dashboard asks for."""
    return {name for text in expressions(path) for name in metrics_in(text)}


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:ray|airflow)_\w+", expression))


# As Grafana sends them, with a value for each variable.
QUERIES = [
    text.replace("$price", "2.50").replace("$run", ".*")
    for path in DASHBOARDS
    for text in expressions(path)
]


@cache
def metrics_of_nodes() -> set[str]:
    """What Ray's agents tell of their machines, by their own table."""
    from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

    return {f"ray_{name}" for name in METRICS_GAUGES}


def metrics_of_gpus() -> set[str]:
    """Those of them that only a machine with GPUs has."""
    return {name for name in metrics_of_nodes() if re.search("_gpus?_|_gram_", name)}


def metrics_of_airflow() -> set[str]:
    """Gauges by Airflow's own list, as Prometheus spells those that come by OpenTelemetry."""
    import airflow

    shared = Path(airflow.__file__).parent / "_shared" / "observability" / "metrics"
    listed = yaml.safe_load((shared / "metrics_template.yaml").read_text())["metrics"]
    gauges = [each["name"] for each in listed if each["type"] == "gauge"]
    return {f"airflow_{name.replace('.', '_')}" for name in gauges}


def metrics_of_training() -> set[str]:
    from ray_jobs.gauges import gauge_name

    return {f"ray_{gauge_name(curve)}" for curve in (*POINT.curves(), "train/step")}


def metrics_of_ray_core() -> set[str]:
    """Seen in a scrape of a real node; tests/integration/test_ray_nodes.py scrapes another."""
    return set((Path(__file__).parent / "ray_metrics.txt").read_text().split())


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_one(path: Path) -> None:
    board = json.loads(path.read_text())
    assert [error.message for error in Draft202012Validator(DASHBOARD).iter_errors(board)] == []
    assert board["uid"] == path.stem
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len({*places}) == len({panel["id"] for panel in board["panels"]}) == len(places)
    variables = {each["name"] for each in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"])))
    assert used == variables


def test_what_panels_ask_for_is_told() -> None:
    told = metrics_of_nodes() | metrics_of_airflow() | metrics_of_training() | metrics_of_ray_core()
    for path in DASHBOARDS:
        assert all(re.search(r"\b(ray|airflow)_", text) for text in expressions(path))
        assert named(path) - told == set()


def test_prometheus_reads_its_file_and_the_panels_queries(tmp_path: Path) -> None:
    if not shutil.which("promtool"):
        pytest.skip("no promtool is installed (on Debian: apt-get install prometheus)")
    rules = [{"record": f"panel_{n}", "expr": query} for n, query in enumerate(QUERIES)]
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "a", "rules": rules}]})
    )
    for what, file in (("rules", tmp_path / "rules.yaml"), ("config", FOLDER / "prometheus.yaml")):
        checked = subprocess.run(["promtool", "check", what, file], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


def test_there_is_a_panel_for_each_question() -> None:
    asked = {name for path in DASHBOARDS for name in named(path)}
    mfu, data, gpu, queue = (
        "ray_penstock_train_mfu",
        "ray_penstock_train_data_wait_share",
        "ray_node_gpus_utilization",
        "airflow_pool_queued_slots",
    )
    assert {mfu, data, gpu, queue} <= asked
    assert any("$price" in text for path in DASHBOARDS for text in expressions(path))


def test_compose_takes_monitoring_only_where_it_is_asked_for(tmp_path: Path) -> None:
    from tests.unit.infra.test_compose import FILE, FILLED

    (tmp_path / "images.env").write_text(FILLED)
    files = ["--file", FILE, "--file", COMPOSE / "monitoring.yaml"]
    read = _compose(tmp_path, files)
    plain = _compose(tmp_path, files[:2])
    assert read["services"].keys() - plain["services"].keys() == {"prometheus", "grafana"}
    assert "METRICS" not in json.dumps(plain)
    scheduler = read["services"]["scheduler"]["environment"]
    assert scheduler["AIRFLOW__METRICS__OTEL_ON"] == "True"
    assert scheduler["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"].startswith("http://prometheus:9090/")
    assert "--web.enable-otlp-receiver" in read["services"]["prometheus"]["command"]
    for name in ("ray-head", "ray-worker"):
        service = read["services"][name]
        assert service["environment"]["PENSTOCK_METRICS"] == "1"
        assert "--metrics-export-port=8080" in service["command"][2]
    own = yaml.safe_load((COMPOSE / "monitoring.yaml").read_text())["services"]
    assert "ports" not in own["prometheus"]
    assert own["grafana"]["ports"] == ["127.0.0.1:3000:3000"]
    mounted = [each for name in ("prometheus", "grafana") for each in own[name]["volumes"]]
    ours = [each.partition(":")[0] for each in mounted if each.startswith("..")]
    assert len(ours) == 4
    assert all((COMPOSE / file).exists() for file in ours)
    (job,) = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    (nodes,) = job["dns_sd_configs"]
    assert set(nodes["names"]) <= read["services"].keys()
    assert nodes["port"] == 8080


def _compose(folder: Path, files: list[Any]) -> dict[str, Any]:
    if not shutil.which("docker-compose"):
        pytest.skip("no docker-compose is installed (on Debian: apt-get install docker-compose)")
    command = ["docker-compose", "--env-file", folder / "images.env", *files, "config"]
    read = subprocess.run(command, capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    config: dict[str, Any] = yaml.safe_load(read.stdout)
    return config
