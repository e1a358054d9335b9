"""A team's own project, on an installed wheel, in folders with spaces and very long paths.

As a new user would, by the commands of docs/projects.md: build the wheel, install it in an empty
environment, make a project, install the rest by its lock, start the platform, and let the scheduler
start a recipe by its cron expression.
"""

import io
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import datetime, timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil
import pytest
from rich.console import Console

from pipelines.core.machine import free_port
from pipelines.core.settings import PROJECT
from pipelines.orchestration.jobs_api import ADDRESS_FILE, TOKEN_FILE
from pipelines.platform.parts import AIRFLOW
from pipelines.platform.supervisor import GROUP, Supervisor
from pipelines.run.records import PATCH_FILE
from pipelines.run.workspace import workspace_path
from pipelines.stages.stage_process import user_error
from tests.browser import airflow_page, take_picture
from tests.conftest import FOREIGN, PORT_VARIABLES
from tests.infra.runbook import PROJECTS, commands
from tests.own_dag import OWN_DAG
from tests.team_package import write_package

if TYPE_CHECKING:
    from playwright.sync_api import Page

LENGTH = 150
NAME = "team-tiny"
RECIPE = """name: {name}
description: {about}
data:
  source: {{kind: stdlib, max_documents: 60}}
  tokenizer: {{kind: byte}}
  sequence_length: 64
  validation_fraction: 0.2
model: {{preset: llama-100k}}
train:
  {{steps: 20, warmup_steps: 2, micro_batch_size: 4, global_batch_size: 8, checkpoint_every: 10}}
evaluate:
  max_bytes: 100000
  sample_tokens: 0
  bias: {{enabled: false}}
  safety: {{documents: 0}}
register: {{model_name: {name}}}
schedule: {schedule}
"""
READER = "team-reader"
OURS = "owner: ada, tags: [team-a]"
# What else the team has, so that its list in Airflow has eight recipes.
LATER = f"{(datetime.now().hour + 12) % 24}"
OTHERS = {
    READER: ("A tiny model, for each new version of the data.", f"{{dataset: {NAME}, {OURS}}}"),
    "base-de": ("The German base model.", f'{{cron: "0 {LATER} * * 1", owner: ada, tags: [base]}}'),
    "chat-de": ("The German base, tuned for chat.", "{model: base-de@champion, owner: bo}"),
    "code": (
        "Completes our own code.",
        f'{{refresh: "30 {LATER} * * *", owner: bo, paused: true}}',
    ),
}
CHILD = "team-child"
CHILD_RECIPE = f"""name: {CHILD}
description: The tiny model, trained on by LoRA whenever it has another champion.
data:
  source: {{kind: stdlib, max_documents: 60}}
  tokenizer: {{kind: model}}
  sequence_length: 64
  validation_fraction: 0.2
model: {{init_from: models:/{NAME}@champion}}
adapter: {{kind: lora, rank: 4}}
train: {{steps: 10, warmup_steps: 2, micro_batch_size: 4, global_batch_size: 8}}
evaluate:
  max_bytes: 100000
  sample_tokens: 0
  bias: {{enabled: false}}
  safety: {{documents: 0}}
register: {{model_name: {CHILD}}}
schedule: {{model: {NAME}@champion, owner: ada, tags: [team-a]}}
"""
# The same weights once more, as another version.
AGAIN = f"""
import shutil, tempfile
from pathlib import Path
from pipelines.registry import registry
from pipelines.registry.registration import register
from pipelines.tracking.tracked_run import MODEL_HASH_TAG
first = registry.find("{NAME}")
folder = Path(tempfile.mkdtemp()) / "model"
left_out = shutil.ignore_patterns("MLmodel", "model.sig")
shutil.copytree(registry.verified_folder(first), folder, ignore=left_out)
register([folder], first.name, first.run_id, first.tags | {{MODEL_HASH_TAG: "again"}}, "again")
"""
# The same task on the cluster that a connection of Airflow names.
CONNECTED_DAG = OWN_DAG.replace('"own"', '"connected"').replace(
    'task_id="count",', 'task_id="count",\n        ray_conn_id="team_ray",'
)
CONNECT = """
from pipelines.core.settings import load_settings
from pipelines.platform.airflow_api import AirflowApi
settings = load_settings()
token = settings.ray_token_path.read_text()
body = dict(connection_id="team_ray", conn_type="ray_jobs", host=settings.ray_url, password=token)
AirflowApi(settings)._client.post("/api/v2/connections", json=body).raise_for_status()
"""
COUNT = """import os, time
def say(text):
    open(os.environ["OUT"], "a").write(text)
say("began ")
time.sleep(20)
say("ended ")
"""
TRIGGER = """
from pipelines.core.settings import load_settings
from pipelines.platform.airflow_api import AirflowApi
airflow = AirflowApi(load_settings())
airflow.wait_for_dag("{dag}")
airflow.unpause("{dag}")
airflow.trigger("{dag}", "{run}", dict())
"""
# As a user does on the task's page, once no process of the task waits for the job.
MARK_FAILED = """
import time
from pipelines.core.settings import load_settings
from pipelines.platform.airflow_api import AirflowApi
airflow = AirflowApi(load_settings())
while airflow.task("own", "{run}", "count", -1)["state"] != "deferred":
    time.sleep(0.2)
path = "/api/v2/dags/own/dagRuns/{run}/taskInstances/count"
airflow._client.patch(path, json=dict(new_state="failed")).raise_for_status()
"""
END_OF_JOB = """
import asyncio
from pipelines.orchestration.jobs_api import jobs_api
async def end():
    async with jobs_api() as jobs:
        while (job := await jobs.get("{job}")).live:
            await asyncio.sleep(0.5)
        return job.status
print(asyncio.run(end()))
"""
STATE = """
from pipelines.core.settings import load_settings
from pipelines.platform.airflow_api import AirflowApi
print(AirflowApi(load_settings()).run_state("{dag}", "{run}"))
"""
RUN_LIMIT_S = 900
# The docs' own lines.
INSTALL = commands("Begin", "Install", page=PROJECTS)
*TO_THE_PLATFORM, FIRST_RUN = commands("Begin", "The first run", page=PROJECTS).splitlines()
README = (PROJECT / "README.md").read_text()
AD_HOC = re.search(r"^    (ray job submit .*)$", README, re.MULTILINE)[1]
# uv reads none of pip's: a machine may have its packages from a mirror.
PIP_SETTINGS = f'eval "$("{sys.executable}" "{PROJECT}/infra/pip_settings.py")"'

Shell = Callable[..., str]


def odd_folder(parent: Path, name: str) -> Path:
    """A folder whose path has at least 150 characters, spaces among them."""
    folder = parent / "odd path"
    folder /= "x" * max(1, LENGTH - len(str(folder)) - len(name) - 2)
    return folder / name


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where OpenLineage's client writes the events."""
    return tmp_path_factory.mktemp("catalogue") / "events.jsonl"


@pytest.fixture(scope="module")
def shell(events: Path) -> Shell:
    environment = {
        **{name: value for name, value in os.environ.items() if name not in FOREIGN},
        **{variable: str(free_port()) for variable in PORT_VARIABLES},
    }
    for name in ("PENSTOCK_HOME", "PENSTOCK_PROJECT", "VIRTUAL_ENV"):
        environment.pop(name, None)
    catalogue = {"TYPE": "file", "LOG_FILE_PATH": str(events), "APPEND": "true"}
    environment |= {f"OPENLINEAGE__TRANSPORT__{name}": value for name, value in catalogue.items()}

    def run(command: str, folder: Path) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture(scope="module")
def project(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project beside its environment, with the platform up and a recipe on a schedule."""
    folder = odd_folder(tmp_path_factory.mktemp("team"), "our-models")
    folder.parent.mkdir(parents=True)
    assert len(str(folder)) >= LENGTH
    shell(commands("Begin", "The wheel", page=PROJECTS), PROJECT)
    (wheel,) = re.findall(r"install (penstock-\S+)", INSTALL)
    shutil.copy(PROJECT / "dist" / wheel, folder.parent)
    shell(f"set -e\n{PIP_SETTINGS}\n{INSTALL}", folder.parent)
    (folder.parent / "environment").symlink_to(folder / ".venv")
    install_extensions(shell, folder)
    (folder / "recipes" / f"{CHILD}.yaml").write_text(CHILD_RECIPE)
    for name, (about, schedule) in OTHERS.items():
        text = RECIPE.format(name=name, about=about, schedule=schedule)
        (folder / "recipes" / f"{name}.yaml").write_text(text)
    code, out = folder / "jobs", folder / "data" / "told"
    for name in ("jobs", "dags"):
        (folder / name).mkdir()
    (code / "count.py").write_text(COUNT)
    for name, dag in (("own", OWN_DAG), ("connected", CONNECTED_DAG)):
        text = dag.replace("/srv/jobs", str(code)).replace("/srv/told", str(out))
        (folder / "dags" / f"{name}.py").write_text(text)
    commit(shell, folder, "Our models")
    try:
        shell("\n".join(TO_THE_PLATFORM), folder)
        # The next minute, which may pass before Airflow has read the recipe.
        at = datetime.now().astimezone() + timedelta(minutes=1)
        cron = f'cron: "{at.minute} {at.hour} * * *", timezone: {local_zone()}'
        schedule = f'{{{cron}, refresh: "@yearly", {OURS}}}'
        about = "A tiny model, to see that a schedule starts it."
        recipe = RECIPE.format(name=NAME, about=about, schedule=schedule)
        (folder / "recipes" / f"{NAME}.yaml").write_text(recipe)
        commit(shell, folder, "A recipe on a schedule")
        yield folder
    finally:
        shell("../environment/bin/penstock down", folder)


def commit(shell: Shell, project: Path, message: str) -> None:
    """Commit all that is new in the project."""
    who = "-c user.name=ada -c user.email=ada@example.org"
    shell(f"git add -A && git {who} commit -qm '{message}'", project)


def install_extensions(shell: Shell, project: Path) -> None:
    """Build and install the package of docs/extensions.md, and take its recipe into the project."""
    package, database = project.parent / "team nlp", project / "data" / "tickets.sqlite"
    write_package(package)
    uv = "../environment/bin/uv"
    shell(
        f"{PIP_SETTINGS}\n"
        f'"{uv}" build --quiet --wheel --out-dir wheels\n'
        f'VIRTUAL_ENV="$PWD/../environment" "{uv}" pip install --quiet --no-deps wheels/*.whl',
        package,
    )
    texts = [f"Printer {n} is lost: it was on floor {n % 7} last week." for n in range(200)]
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE ticket (id, year, changed, text)")
        rows = [
            (n, 2020 + n % 4, "monday", text) for n, text in enumerate([*texts, "GIVE IT BACK"])
        ]
        connection.executemany("INSERT INTO ticket VALUES (?, ?, ?, ?)", rows)
    recipe = (package / "recipes" / "tickets.yaml").read_text()
    (project / "recipes" / "tickets.yaml").write_text(
        recipe.replace("~/tickets.sqlite", f'"{database}"')
    )


def local_zone() -> str:
    """UTC shifted by whole hours, as tzdata names it: the tests' machine may be anywhere."""
    offset = datetime.now().astimezone().utcoffset() or timedelta()
    hours = round(offset.total_seconds() / 3600)
    return f"Etc/GMT{-hours:+d}" if hours else "UTC"


@pytest.fixture(scope="module")
def run(shell: Shell, project: Path) -> dict[str, Any]:
    """The run that the scheduler starts by itself, once it is over."""
    return ended(shell, project, NAME)[0]


def ended(shell: Shell, project: Path, recipe: str, count: int = 1) -> list[dict[str, Any]]:
    """Wait for so many runs of a recipe to be over; return them, the oldest first."""
    end = time.monotonic() + RUN_LIMIT_S
    while time.monotonic() < end:
        found = []
        for path in (project / ".penstock" / "runs").glob(f"{recipe}__*/run.json"):
            record = path.parent / "outputs" / "register" / "record.json"
            if record.is_file():
                verdict = json.loads(record.read_text())["verdict"]["decision"]
                parameters = (path.parent / "params.yaml").read_text()
                run = json.loads(path.read_text())
                found.append({"run": run, "verdict": verdict, "parameters": parameters})
        if len(found) >= count:
            return sorted(found, key=lambda each: each["run"]["dag_run_id"])
        time.sleep(2)
    log = shell("../environment/bin/penstock logs scheduler | tail -30", project)
    raise AssertionError(f"{count} runs of {recipe} were not over in {RUN_LIMIT_S} s\n{log}")


pytestmark = pytest.mark.timeout(3000)


def test_the_scheduler_starts_the_teams_recipe_and_a_champion_is_there(shell, project, run):
    assert run["verdict"] == "promoted"
    listed = json.loads(shell("../environment/bin/penstock models list --json", project))
    assert (NAME, 1) in [(model["name"], model["champion"]) for model in listed]


def test_the_run_names_the_teams_commit_and_the_product_beside_it(shell, project, run):
    last = shell(f"git log -1 --format=%H -- recipes/{NAME}.yaml", project).strip()
    assert (run["run"]["git_commit"], run["run"]["dirty"]) == (last, False)
    assert set(run["run"]["product"]) == {"version", "code"}
    assert run["run"]["dag_run_id"].startswith(f"{NAME}__scheduled__")


def test_a_promotion_starts_the_models_child_which_names_its_parent(shell, project, run):
    (child,) = ended(shell, project, CHILD)
    assert child["verdict"] == "promoted"
    assert child["run"]["dag_run_id"].startswith(f"{CHILD}__asset_triggered__")
    assert f"init_from: models:/{NAME}@1" in child["parameters"]
    parents = json.loads(shell("../environment/bin/penstock models list --tree --json", project))
    assert parents == {f"{NAME}@1": None, f"{CHILD}@1": f"{NAME}@1"}
    shown = shell(f"../environment/bin/penstock models show {CHILD}@1 --lineage", project)
    assert shown.index(f"└── {NAME}@1") < shown.index(f"└── {CHILD}@1")


def test_the_companys_catalogue_joins_the_model_to_its_parent(shell, project, run, events):
    ended(shell, project, CHILD)

    def named(job: str, side: str) -> dict[str, str]:
        lines = [json.loads(line) for line in events.read_text().splitlines()]
        return {
            each["name"]: each["facets"]["version"]["datasetVersion"]
            for event in lines
            if event["job"]["name"] == job and event["eventType"] == "COMPLETE"
            for each in event[side]
        }

    end = time.monotonic() + 240  # they are sent when Airflow has ended the run
    while f"model/{CHILD}" not in named(f"{CHILD}.register", "outputs"):
        assert time.monotonic() < end
        time.sleep(1)
    assert named(f"{NAME}.register", "outputs")[f"model/{NAME}"] == "1"
    assert named(f"promote.{NAME}", "outputs") == {f"model/{NAME}@champion": "1"}
    assert named(f"{CHILD}.train", "inputs")[f"model/{NAME}"] == "1"
    assert named(f"{CHILD}.register", "outputs")[f"model/{CHILD}"] == "1"


def test_a_promotion_and_a_rollback_by_hand_start_it_too(shell, project, run):
    ended(shell, project, CHILD)
    penstock = "../environment/bin/penstock"
    (project.parent / "again.py").write_text(AGAIN)
    shell("../environment/bin/python ../again.py", project)
    changed = "The tiny model, trained on by another sentence."
    recipe = project / "recipes" / f"{CHILD}.yaml"
    recipe.write_text(re.sub("(?m)^description: .*$", f"description: {changed}", CHILD_RECIPE))
    commit(shell, project, "Another sentence")
    shell(f"{penstock} models promote {NAME}@2 --why 'a test'", project)
    preprocessed(project, 2)
    shell(f"{penstock} models rollback {NAME} --why 'a test'", project)  # while the child trains
    _, second, third = ended(shell, project, CHILD, 3)
    assert changed in second["parameters"]  # the next run has the recipe as it was committed
    assert second["run"]["git_commit"] == shell("git rev-parse HEAD", project).strip()
    assert f"init_from: models:/{NAME}@2" in second["parameters"]
    assert second["verdict"] == "unchanged"  # by content, the parent is the same
    assert f"init_from: models:/{NAME}@1" in third["parameters"]


def test_a_run_goes_on_when_its_recipe_is_renamed_in_a_dirty_project(shell, project, run):
    ended(shell, project, CHILD, 3)
    recipes, note = project / "recipes", "# A note that nobody has committed.\n"
    (recipes / f"{NAME}.yaml").write_text((recipes / f"{NAME}.yaml").read_text() + note)
    for name in ("renamed", "queued"):  # one at a time
        trigger(shell, project, CHILD, f"{CHILD}__{name}")
    preprocessed(project, 4)
    renamed = (recipes / f"{CHILD}.yaml").read_text().replace(CHILD, "team-pupil")
    (recipes / "team-pupil.yaml").write_text(renamed)
    (recipes / f"{CHILD}.yaml").unlink()
    try:
        *_, last = ended(shell, project, CHILD, 4)
        why = failed_before_it_began(shell, project, CHILD, f"{CHILD}__queued")
    finally:
        shell("git checkout -q recipes && rm recipes/team-pupil.yaml", project)
    assert why.startswith(f"recipe file recipes/{CHILD}.yaml does not exist")
    assert last["verdict"] == "unchanged"
    assert last["run"]["dirty"]
    workspace = workspace_path(project / ".penstock" / "runs", last["run"]["dag_run_id"])
    assert note in (workspace / PATCH_FILE).read_text()
    models = json.loads(shell("../environment/bin/penstock models list --json", project))
    assert "team-pupil" not in {model["name"] for model in models}


def test_new_data_start_the_recipe_that_waits_for_them_on_their_version(shell, project, run):
    trigger(shell, project, f"{NAME}.refresh", "look")
    (reader,) = ended(shell, project, READER)
    assert reader["run"]["dag_run_id"].startswith(f"{READER}__asset_triggered__")
    assert f"path: {NAME}@1" in reader["parameters"]


def failed_before_it_began(shell: Shell, project: Path, dag: str, run: str) -> str:
    """Wait until a run has failed; return the line of its first task."""
    code, end = STATE.format(dag=dag, run=run), time.monotonic() + RUN_LIMIT_S
    while (state := shell(f"../environment/bin/python -c '{code}'", project).strip()) != "failed":
        assert state in ("queued", "running")
        assert time.monotonic() < end
        time.sleep(2)
    workspace = workspace_path(project / ".penstock" / "runs", f"{dag}__{run}")
    return user_error(workspace, "prepare") or ""


def preprocessed(project: Path, count: int) -> None:
    """Wait until so many runs of the child have ended their first stage."""
    end = time.monotonic() + RUN_LIMIT_S
    pattern = f"{CHILD}__*/outputs/preprocess/record.json"
    while len(list((project / ".penstock" / "runs").glob(pattern))) < count:
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_package_of_the_teams_own_is_trained_with(shell, project):
    penstock = "../environment/bin/penstock"
    done = json.loads(shell(f"{penstock} run --recipe tickets --json", project))
    assert done["model"] == {"name": "tickets", "version": 1, "aliases": ["champion"]}
    outputs = workspace_path(project / ".penstock" / "runs", done["dag_run_id"]) / "outputs"
    stats = json.loads((outputs / "preprocess" / "stats.json").read_text())
    assert stats["documents"]["dropped"] == {"quiet:too_loud": 1}
    validated = json.loads((outputs / "validate" / "record.json").read_text())
    assert "expect_no_todo" in {each["expectation"] for each in validated["results"]}
    config = json.loads((outputs / "train" / "model" / "config.json").read_text())
    assert config["architectures"] == ["Starcoder2ForCausalLM"]
    evaluated = json.loads((outputs / "evaluate" / "record.json").read_text())
    assert set(evaluated["metrics"]) == {"brevity/words"}
    assert "colours" in {each["task"] for each in evaluated["harness"]}
    assert "2 x acme-x1" in shell(f"{penstock} plan --recipe tickets --gpu acme-x1", project)
    shell(f"{penstock} models export tickets --format numpy --to ../arrays", project)
    assert {path.name for path in (project.parent / "arrays").iterdir()} == {
        "weights.npz",
        "config.json",
        "penstock-export.json",
    }


def test_a_changed_extension_runs_the_stages_that_use_it(shell, project):
    penstock = "../environment/bin/penstock"
    cached = shell(f"{penstock} run --recipe tickets --explain", project)
    assert "preprocess  comes from the cache" in cached
    (metrics,) = (project.parent / "environment").glob("lib/*/site-packages/team_nlp/metrics.py")
    metrics.write_text(metrics.read_text().replace("texts[:8]", "texts[:9]"))
    told = shell(f"{penstock} run --recipe tickets --explain", project)
    assert "extensions.evaluate.metrics/brevity" in told


def trigger(shell: Shell, project: Path, dag: str, run: str) -> None:
    """Start a run by hand, as Airflow's form does."""
    python(shell, project, TRIGGER.format(dag=dag, run=run))


def python(shell: Shell, project: Path, code: str) -> str:
    """What a piece of Python, without single quotes, prints in the team's environment."""
    return shell(f"../environment/bin/python -c '{code}'", project)


class OwnRun:
    """A run of a DAG of the team's own, which writes down what it does."""

    def __init__(self, shell: Shell, project: Path, name: str, dag: str = "own") -> None:
        self.out = project / "data" / "told"
        self.out.unlink(missing_ok=True)
        self._status = partial(shell, "../environment/bin/penstock status --json", project)
        trigger(shell, project, dag, name)
        self.folder = project / ".penstock" / "runs" / f"{dag}__{name}__count"

    @cached_property
    def parts(self) -> dict[str, dict[str, Any]]:
        """What the platform says of each part, all of which must be ready."""
        return {each["name"]: each for each in json.loads(self._status())["parts"]}

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + 600
        while text not in self.told:
            assert time.monotonic() < end, self.told
            time.sleep(0.5)

    @property
    def told(self) -> str:
        return self.out.read_text() if self.out.is_file() else ""


def test_the_operator_survives_kills_in_a_dag_that_knows_nothing_of_penstock(shell, project):
    run = OwnRun(shell, project, "rows-10-and-11")
    run.wait_for("began")
    for part in ("scheduler", "triggerer"):
        os.kill(run.parts[part]["pid"], signal.SIGKILL)
    run.wait_for("told")
    assert run.told == "began ended told "


def test_a_job_ends_with_its_task_while_the_triggerer_is_down(shell, project):
    with supervisor_of(project)._rpc() as rpc:
        rpc.stopProcess(f"{GROUP}:triggerer", True)
    try:
        run = OwnRun(shell, project, "marked")
        run.wait_for("began")
        python(shell, project, MARK_FAILED.format(run="marked"))
        job = json.loads((run.folder / "jobs" / "count.json").read_text())["submissions"][-1]
        status = python(shell, project, END_OF_JOB.format(job=job)).strip()
    finally:
        shell("../environment/bin/penstock up", project)
    assert (status, run.told) == ("STOPPED", "began ")


def test_a_task_runs_on_the_cluster_of_its_connection(shell, project):
    python(shell, project, CONNECT)
    run = OwnRun(shell, project, "by-connection", "connected")
    run.wait_for("told")
    assert run.told == "began ended told "
    assert (run.folder / ADDRESS_FILE).read_text() == run.parts["ray"]["url"]
    assert (run.folder / TOKEN_FILE).stat().st_mode & 0o777 == 0o600


def supervisor_of(project: Path) -> Supervisor:
    """What starts and stops the parts of the team's platform."""
    return Supervisor(Path((project / ".penstock" / "services" / "runtime").read_text()))


@pytest.mark.faults
def test_row_08_the_ray_head_and_its_job(shell, project):
    run = OwnRun(shell, project, "row-8")
    run.wait_for("began")
    head = psutil.Process(run.parts["ray"]["pid"])
    for process in [*head.children(recursive=True), head]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    run.wait_for("told")
    assert run.told == "began began ended told "


@pytest.mark.faults
def test_row_09_the_process_of_the_task(shell, project):
    run = OwnRun(shell, project, "row-9")
    presence = run.folder / "jobs" / "count.process.json"
    end = time.monotonic() + 600
    while not presence.is_file():
        assert time.monotonic() < end
    os.kill(json.loads(presence.read_text())["pid"], signal.SIGKILL)
    run.wait_for("told")
    assert run.told == "began ended told "


@pytest.mark.faults
def test_row_12_all_of_airflow_for_20_s(shell, project):
    run = OwnRun(shell, project, "row-12")
    run.wait_for("began")
    supervisor = supervisor_of(project)
    for part in AIRFLOW:
        with supervisor._rpc() as rpc:
            rpc.stopProcess(f"{GROUP}:{part}", True)
    time.sleep(20)
    for part in AIRFLOW:
        supervisor.start(part)
    run.wait_for("told")
    assert run.told == "began ended told "


def test_the_recipe_that_init_writes_runs_as_it_is(shell, project):
    done = json.loads(shell(f"{TO_THE_PLATFORM[0]}\n{FIRST_RUN} --json", project))
    assert done["state"] == "success"
    assert done["model"] == {"name": "our-models-first", "version": 1, "aliases": ["champion"]}


def test_a_job_for_ray_trains_in_the_project(shell, project):
    told = shell(f"{TO_THE_PLATFORM[0]}\n{AD_HOC}", project)
    workspace = Path(re.search(r"workspace (/.*)", told)[1])
    record = json.loads((workspace / "outputs" / "train" / "record.json").read_text())
    assert record["steps"] == 50


def test_the_doctor_finds_the_platform_well(shell, project):
    told = json.loads(shell("../environment/bin/penstock doctor --json || true", project))
    found = {(each["check"], each["state"]) for each in told["parts"]["services"]}
    assert found >= {("Airflow", "ok"), ("Ray", "ok"), ("MLflow", "ok")}


@pytest.fixture(scope="module")
def page(shell, project):
    status = json.loads(shell("../environment/bin/penstock status --json", project))
    (airflow,) = (each["url"] for each in status["parts"] if each["name"] == "api-server")
    with airflow_page(airflow, Path(status["airflow_login"]["password_file"])) as page:
        yield page


def airflow_at(page: "Page") -> str:
    """Airflow's address, of which the page shows some part."""
    return "http://" + urlsplit(page.url).netloc


def test_the_list_of_dags_is_that_of_the_teams_recipes(page, project, run):
    recipes = {path.stem for path in (project / "recipes").glob("*.yaml")}
    assert len(recipes) == 8
    page.set_viewport_size({"width": 1440, "height": 1060})
    page.goto(f"{airflow_at(page)}/dags")
    page.get_by_label("Show table view").click()
    for name in recipes:
        page.get_by_role("link", name=name, exact=True).first.wait_for()
    take_picture(page, "team_dags")


def test_the_form_shows_the_recipes_own_values(page, run):
    page.set_viewport_size({"width": 1280, "height": 1200})
    page.goto(f"{airflow_at(page)}/dags/{NAME}")
    page.get_by_test_id("trigger-dag-button").click()
    page.get_by_role("button", name="Train").click()
    page.get_by_text("Optimizer steps. Empty: 20").wait_for()
    take_picture(page, "recipe_form")
    page.keyboard.press("Escape")


def test_the_line_of_descent_is_drawn(shell, project, page, run):
    ended(shell, project, CHILD)
    command = "penstock models list --tree"
    drawn = shell(f"../environment/bin/{command}", project)
    assert re.search(rf"{NAME}@1.*\n.*└── {CHILD}@1", drawn)
    console = Console(record=True, width=60, file=io.StringIO())
    console.print(drawn.rstrip(), markup=False, highlight=False)
    page.set_content(f"<style>svg {{ width: 640px }}</style>{console.export_svg(title=command)}")
    take_picture(page.locator("svg").first, "descent")


def test_the_commands_work_in_every_folder_of_the_project(shell, project):
    penstock = "../../environment/bin/penstock"
    assert "ok     first" in shell(f"{penstock} recipes check", project / "recipes")
    assert f"ok     {CHILD}" in shell(f"{penstock} recipes check", project / "data")
    assert NAME in shell(f"{penstock} recipes list", project / "recipes")
    for name in (NAME, CHILD):
        assert "fits" in shell(f"{penstock} plan --recipe {name}", project / "recipes")


def test_outside_of_a_project_one_line_says_what_to_do(shell, project):
    done = subprocess.run(
        [project.parent / "environment/bin/penstock", "status"],
        cwd=project.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "`penstock init FOLDER` makes one" in done.stderr
