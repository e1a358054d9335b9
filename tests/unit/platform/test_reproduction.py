"""A model made twice: here, and by the command in a workspace of its own."""

import hashlib
import json
import shutil
import subprocess
import sys
from functools import partial

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.core.errors import UserError
from pipelines.core.settings import PROJECT
from pipelines.core.storage import read_json, write_json
from pipelines.datasets.run_source import settle
from pipelines.platform import reproduction
from pipelines.recipe.recipe_files import load_recipe
from pipelines.registry.registration import register
from pipelines.run.records import PATCH_FILE, TrainRecord, ValidateRecord
from pipelines.stage_cache.open_workspace import open_workspace, project_state
from pipelines.stages.evaluate import evaluation
from pipelines.stages.preprocess import preprocessing
from pipelines.stages.register.provenance import provenance
from pipelines.stages.train import train_stage
from pipelines.tracking.tracked_run import MODEL_HASH_TAG
from tests.unit.stage_cache.cached_project import git, make_project

pytestmark = pytest.mark.long

SMALL = ("train.steps=6", "train.warmup_steps=0", "data.source.kind=files", "resources.workers=1")
SIZED = (
    "evaluate.budget_gb=1",
    "evaluate.budget_max_loss=9",
    "evaluate.sample_tokens=0",
    "evaluate.bias.enabled=false",
    "evaluate.safety.documents=0",
)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    lines = (json.dumps({"text": f"{n} is the number behind {n - 1}\n" * 20}) for n in range(40))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def prepare(home, text):
    """Makes a workspace with this checkout's code as it is, up to the stage before training."""

    def make(run_id, *overrides):
        recipe = load_recipe("debug", [*SMALL, *overrides, f"data.source.path={text}"])
        recipe, source = settle(recipe)
        folder = open_workspace(PROJECT, home, run_id, recipe, source)
        preprocessing.run(recipe, folder)
        ValidateRecord(expectations=1, data_docs="data_docs/index.html").write(folder)
        return recipe, folder

    return make


@pytest.fixture
def add(name, mlflow_run, tmp_path):
    """Registers a model of a workspace with its lineage."""
    card = tmp_path / "card"

    def make(recipe, folder, model="outputs/train/model", **changes):
        facts = provenance(recipe, folder)
        write_json(card / "lineage.json", facts | {"run": facts["run"] | changes})
        if (folder / PATCH_FILE).is_file():
            shutil.copyfile(folder / PATCH_FILE, card / PATCH_FILE)
        tags = {MODEL_HASH_TAG: hashlib.sha256(str(changes).encode()).hexdigest()}
        return register([folder / model, card], name, mlflow_run, tags, "")

    return make


@pytest.fixture
def registered(prepare, add):
    """Registers a model that one process trained."""
    recipe, folder = prepare("first")
    train_stage.run(recipe, folder)
    return partial(add, recipe, folder)


def test_the_weights_and_the_form_of_them_that_is_served_come_out_equal_byte_for_byte(
    prepare, add, text, home
):
    recipe, folder = prepare("sized", *SIZED)
    train_stage.run(recipe, folder)
    chosen = evaluation.run(recipe, folder).right_size
    version = add(recipe, folder, "outputs/evaluate/model")
    shown = CliRunner().invoke(app, ["models", "reproduce", version.label, "--json"])
    assert shown.exit_code == 0, shown.output
    said = json.loads(shown.stdout)
    assert (said["equal"], said["model_hash"]) == (True, chosen.model_hash)
    assert (said["differing"], said["environment"]) == ([], [])
    (again,) = home.glob("runs/reproduce-*")
    assert TrainRecord.read(again).model_hash == TrainRecord.read(folder).model_hash

    text.write_text(text.read_text() + json.dumps({"text": "one more"}))
    with pytest.raises(UserError, match="its data have changed"):
        reproduction.reproduce(reproduction.find_origin(version))


def test_what_cannot_be_made_once_more_is_one_line(registered, monkeypatch):
    with pytest.raises(UserError, match="has no commit 0123456789; `git fetch` it first"):
        reproduction.reproduce(reproduction.find_origin(registered(git_commit="0123456789")))
    version = registered(git_commit="")
    with pytest.raises(UserError, match="names no commit"):
        reproduction.find_origin(version)


def test_another_environment_is_said_beforehand(registered):
    origin = reproduction.find_origin(registered())
    assert origin.differences() == []
    origin.facts["environment"]["python"] = "3.9.1"
    assert origin.differences()[0].startswith("python was 3.9.1, but here it is 3.")


def test_a_result_that_was_kept_is_said_beforehand(registered):
    origin = reproduction.find_origin(registered())
    kept = {"run": "debug-1", "changed": ["train.lr: 1 -> 2"], "who": "ann@host", "why": "rename"}
    origin.facts["kept"] = {"train": kept}
    assert origin.differences() == [
        "train runs again here, but its result was kept from debug-1 although train.lr: 1 -> 2 "
        "(ann@host: rename)"
    ]


def test_every_file_that_differs_is_named(tmp_path):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        (tmp_path / folder / "model.safetensors").write_text(folder)
    (tmp_path / "first" / "README.md").write_text("what lies beside the model is not compared")
    (tmp_path / "second" / "tokenizer.json").write_text("{}")
    assert reproduction._differing(tmp_path / "first", tmp_path / "second") == (
        "model.safetensors",
        "tokenizer.json",
    )


def test_training_is_pinned_to_the_layout_that_it_had(registered):
    origin = reproduction.find_origin(registered())
    command = reproduction._training(origin)
    assert command[0] == "pipelines.training"
    assert "--last-step" not in "".join(command)
    layout = dict(each.removeprefix("--set=").split("=") for each in command if "--set=" in each)
    assert layout["parallel.dp_shard"] == "1"
    assert layout["train.max_seconds"] == "null"  # a slower moment must not stop it
    train_record = origin.facts["records"]["train"]
    train_record["layout"] |= {"parallel.dp_shard": 2, "parallel.tp": 2}
    assert "--nproc-per-node=4" in reproduction._training(origin)


def test_a_workspace_at_another_commit_has_its_code_and_diff(tmp_path):
    project = make_project(tmp_path)
    code = project / "dvc.yaml"
    then = code.read_text()
    code.write_text(f"{then}# uncommitted then\n")
    state = project_state(project)
    git(project, "commit", "--quiet", "--all", "--message", "later")
    code.write_text("# uncommitted now\n")
    recipe = load_recipe("debug")
    workspace = open_workspace(project, tmp_path / "home", "old", recipe, {}, state=state)
    assert (workspace / "dvc.yaml").read_text() == f"{then}# uncommitted then\n"
    assert (workspace / PATCH_FILE).read_bytes() == state[1]


def test_over_two_processes_to_the_step_that_the_clock_had_chosen(prepare, add):
    limited = ("train.max_seconds=0.001", "train.lr_schedule=wsd")
    recipe, folder = prepare("two", "resources.workers=2", "parallel.sharding=full", *limited)
    run = read_json(folder / "run.json")
    two = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    engine = ["pipelines.training", "--recipe=params.yaml", "--workspace=."]
    subprocess.run([sys.executable, "-m", *two, *engine], cwd=folder, check=True)
    trained = TrainRecord.read(folder)
    assert (trained.steps, trained.layout["parallel.dp_shard"]) == (4, 2)
    version = add(recipe, folder, **run)  # the engine alone knows of no commit
    made = reproduction.reproduce(reproduction.find_origin(version))
    assert (made.equal, made.model_hash) == (True, trained.model_hash)
