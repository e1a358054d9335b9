"""The Compose file's platform, up for real: a run to a champion, faults, and all of it kept."""

import json
import re
import shlex
import threading
import time

import pytest

from pipelines.core.settings import PROJECT
from tests.infra.compose_stack import PORTS, stack
from tests.infra.machine import needs
from tests.infra.runbook import commands

pytestmark = [pytest.mark.infra, pytest.mark.timeout(3600)]

OPTIONS = "--json --set train.checkpoints=s3://penstock/checkpoints"
RUN = f"penstock run --recipe debug {OPTIONS}"
CHAMPION = """python - <<'PY'
from mlflow import MlflowClient
version = MlflowClient().get_model_version_by_alias("penstock-debug", "champion")
print(version.version, version.source)
PY"""

PUBLISH = """python - <<'PY'
from pipelines.recipe.recipe_files import RESOLVED, load_recipe
from pipelines.core.settings import load_settings
from pipelines.platform.airflow_api import AirflowApi
airflow = AirflowApi(load_settings())
airflow.wait_for_dag("data_refresh")
airflow.unpause("data_refresh")
recipe = load_recipe("debug", ["register.model_name=penstock-published"])
airflow.trigger("data_refresh", "published", {RESOLVED: recipe.to_dict()})
PY"""


@pytest.fixture(scope="module")
def platform(tmp_path_factory):
    needs("podman", "runc", "netavark", "aardvark-dns", "iptables", "mmdebstrap", "ip")
    with stack(tmp_path_factory.mktemp("compose") / "penstock") as made:
        started = time.monotonic()
        made.shell(commands("Compose", "Day 0: install"))
        print(f"up and healthy in {time.monotonic() - started:.0f} s")
        yield made


@pytest.fixture(scope="module")
def first_run(platform):
    started = time.monotonic()
    summary = json.loads(platform.inside("triggerer", RUN, timeout=2400))
    print(f"a run in {time.monotonic() - started:.0f} s")
    return summary


def keys(platform, prefix):
    """The store's objects, as it lists them itself."""
    url = f"http://127.0.0.1:{PORTS['S3_PORT']}/penstock?list-type=2&prefix={prefix}"
    return platform.shell(f"curl --silent '{url}' | grep -o '<Key>[^<]*' || true").split()


def rows(platform, database, query):
    """What Postgres answers, asked in its own container."""
    login = "PGPASSWORD=$(cat /run/secrets/postgres-password)"
    psql = f'{login} psql -h 127.0.0.1 -U penstock {database} -tAc "$QUERY"'
    asked = f"-e QUERY={shlex.quote(query)} postgres sh -c {shlex.quote(psql)}"
    return platform.compose(f"exec -T {asked}").split()


def test_every_part_is_well_and_only_three_ports_are_open_on_the_host(platform):
    assert platform.well()
    listening = platform.shell("ss -Hltn | awk '{print $4}'").split()
    published = {place for place in listening if not place.endswith(":53")}
    assert published == {f"127.0.0.1:{port}" for port in PORTS.values()}


def test_a_run_makes_a_champion_and_all_of_it_lies_in_s3_and_postgres(platform, first_run):
    assert first_run["state"] == "success"
    assert first_run["verdict"] == "promoted"
    assert platform.inside("triggerer", CHAMPION).split()[0] == "1"
    generate = "penstock models generate penstock-debug --prompt import --tokens 4"
    assert platform.inside("triggerer", generate).startswith("import")
    assert any(key.endswith(".safetensors") for key in keys(platform, "mlflow/"))
    assert keys(platform, "checkpoints/")
    assert rows(platform, "mlflow", "select count(*) from model_versions") == ["1"]
    assert rows(platform, "airflow", "select state from dag_run") == ["success"]


def test_a_published_dataset_lies_in_s3_and_becomes_a_model(platform, first_run):
    def runs():
        """The state of the run that publishes, and of the one that its dataset starts."""
        made = f"select dag_id || '=' || state from dag_run where run_id <> '{first}' order by 1"
        return rows(platform, "airflow", made)

    first = first_run["dag_run_id"]
    platform.inside("triggerer", PUBLISH)
    ends = ["data_refresh=success", "llm_pipeline=success"]
    platform.wait(lambda: runs() == ends, "a dataset and a model of it", 600)
    assert "penstock-published" in platform.inside("triggerer", "penstock data show debug@1")
    platform.inside("triggerer", "penstock data verify debug@1")
    assert keys(platform, "datasets/")


def test_a_rerun_by_exec_is_taken_from_the_cache(platform, first_run):
    assert "penstock-debug" in platform.compose("exec -T scheduler penstock models list")
    command = commands("Compose", "Day 1: first run").rstrip()
    again = json.loads(platform.shell(f"{command} {OPTIONS}", timeout=1500))
    assert again["state"] == "success"
    heavy = {name: again["stages"][name]["cached"] for name in ("preprocess", "validate", "train")}
    assert set(heavy.values()) == {True}


def test_a_job_is_submitted_through_tls_with_the_token(platform):
    said = platform.inside(
        "ray-worker", commands("Compose", "Day 1: a job of your own"), timeout=600
    )
    assert "succeeded" in said
    status = "curl --silent --output /dev/null --write-out %{http_code} --cacert /tls/ca.crt"
    refused = platform.compose(f"exec -T ray-https {status} https://localhost:8443/api/jobs/")
    assert refused.strip() in ("401", "403")


def test_what_listens_in_the_network_is_what_the_page_says(platform):
    page = (PROJECT / "docs" / "security.md").read_text().partition("## Ports of Compose")[2]
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d, ]*)", page, re.MULTILINE)
    told = {service: set(map(int, re.findall(r"\d+", ports))) for service, ports in rows}
    for service, ports in told.items():
        listening = platform.listening(service)
        if service.startswith("ray-"):  # which takes others, as they are free, above 10000
            listening = {port for port in listening if port in ports or port < 10000}
        assert listening == ports, service
    assert told.keys() == set(platform.services())


def test_secrets_are_only_where_the_page_says(platform, first_run):
    folder = platform.folder / "secrets"
    names = [path.name for path in folder.iterdir() if not path.name.startswith(("ca.", "model-"))]
    # Of a file with several words the last is the secret: `[default] … = KEY`, `id KEY`.
    secrets = {name: (folder / name).read_text().split()[-1].encode() for name in names}
    del secrets["s3.json"], secrets["pgpass"]  # of which others have the parts
    seen = {
        (service, name)
        for service in platform.services()
        for name, secret in secrets.items()
        if secret in platform.processes_and_logs(service)
    }
    clients = [service for service in platform.services() if service not in ("postgres", "s3")]
    allowed = {(service, "mlflow-password") for service in clients}
    allowed |= {("mlflow", "mlflow-session"), ("postgres", "postgres-password")}
    assert seen - allowed == set()
    for database in ("airflow", "mlflow"):
        rows_ = platform.compose(
            "exec -T postgres sh -c 'PGPASSWORD=$(cat /run/secrets/postgres-password) "
            f"pg_dump --host=127.0.0.1 --username=penstock {database}'"
        ).encode()
        assert [name for name, secret in secrets.items() if secret in rows_] == []


def stop_postgres(platform):
    platform.compose("stop postgres")
    time.sleep(30)
    platform.compose("start postgres")


# In the order in which one run meets them; each comes when it goes on after the one before.
FAULTS = {
    "a killed worker": lambda platform: platform.kill("ray-worker"),
    "a killed scheduler": lambda platform: platform.kill("scheduler"),
    "a restarted head": lambda platform: platform.kill("ray-head"),
    "a stopped Postgres": stop_postgres,
}


def test_one_run_that_is_hurt_four_times_ends_in_success(platform, first_run):
    ended = []
    # Long enough for four faults; with few points of curves, which take half of the machine.
    steps = "--set train.steps=1600 --set train.checkpoint_every=100 --set train.log_every=20"
    command = (
        f"{RUN} {steps} --set register.model_name=penstock-hurt --set evaluate.sample_tokens=0"
    )
    run = threading.Thread(
        # The reconciler's container is the one that no fault ends.
        target=lambda: ended.append(platform.inside("reconciler", command, timeout=1800))
    )
    run.start()
    for name, fault in FAULTS.items():
        before, began = set(keys(platform, "checkpoints/")), time.monotonic()
        platform.wait(
            lambda before=before: (
                set(keys(platform, "checkpoints/")) - before or not run.is_alive()
            ),
            f"no checkpoint was written before {name}",
            600,
        )
        assert run.is_alive(), f"the run ended before {name}"
        print(f"{time.monotonic() - began:.0f} s until a checkpoint, then {name}")
        fault(platform)
        platform.wait(platform.well, f"not well after {name}", 300)
    run.join()
    assert ended, "penstock run failed"
    summary = json.loads(ended[0])
    assert (summary["state"], summary["verdict"]) == ("success", "promoted")


def test_a_dead_raylet_shows(platform):
    def state(wanted):
        platform.wait(
            lambda: platform.health("ray-worker").endswith(f" {wanted}"), f"not {wanted}", 300
        )

    raylet = "$(grep -lx raylet /proc/[0-9]*/comm | cut -d / -f 3)"
    state("healthy")
    platform.inside("ray-worker", f"kill -STOP {raylet}")
    state("unhealthy")
    platform.inside("ray-worker", f"kill -CONT {raylet}")
    state("healthy")


def test_an_upgrade_after_a_backup_loses_nothing_and_the_backup_is_restored(platform, first_run):
    def kept():
        """The objects, MLflow's runs and the champion."""
        runs = rows(platform, "mlflow", "select run_uuid from runs")
        return sorted(keys(platform, "")), runs, platform.inside("triggerer", CHAMPION)

    before = kept()
    platform.shell(commands("Compose", "Day 2: back up"))
    platform.shell(commands("Compose", "Day 2: upgrade"))
    assert kept() == before
    platform.compose("down --volumes")
    platform.shell(commands("Compose", "Day 2: restore"), timeout=1500)
    assert kept() == before
    again = json.loads(platform.inside("triggerer", RUN, timeout=900))
    assert again["state"] == "success"
    assert again["stages"]["train"]["cached"]
