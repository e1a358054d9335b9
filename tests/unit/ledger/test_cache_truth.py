"""What a change reruns, by the project's own dvc.yaml; stages only pretend to work.

A stage's pretended output depends on its inputs' bytes, as a real one does.
"""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from pipelines.core.errors import UserError
from pipelines.core.recipe_files import load_recipe
from pipelines.ledger import stage_cache
from pipelines.ledger.workspace import open_workspace
from pipelines.stages.runner import INPUTS
from tests.project_copy import copy_project

TEMPLATES = "pipelines/recipes/bias_templates.json"
CACHED_STAGES = ("preprocess", "validate", "train", "evaluate")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    return subprocess.run(
        ["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A copy of the project's files as they are now, committed, with every stage in the cache."""
    folder = tmp_path_factory.mktemp("cache truth") / "project"
    copy_project(folder)
    shutil.rmtree(folder / "tests")  # half of the files that each workspace is a clone of
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "copy")
    assert rerun(folder, "original") == list(CACHED_STAGES)
    return folder


@pytest.fixture
def project(original):
    yield original
    git(original, "checkout", "--quiet", ".")


def rerun(project: Path, run_id: str, *overrides: str, source: str = "text") -> list[str]:
    """The stages that a run has to run, each of which is then in the cache."""
    recipe = load_recipe("debug", overrides)
    home = project.parent / "home"
    workspace = open_workspace(project, home, run_id, recipe, {"source": source})
    ran = []
    for stage in CACHED_STAGES:
        if not stage_cache.restore(workspace, stage):
            pretend(workspace, stage)
            stage_cache.commit(workspace, stage)
            ran.append(stage)
    return ran


def stale(project: Path, run_id: str, *overrides: str) -> list[str]:
    """The stages that a run would have to run, each after what the original made before it.

    A quarter of the time of `rerun`: nothing is checked out, and no `dvc.lock` is written.
    """
    recipe = load_recipe("debug", overrides)
    home = project.parent / "home"
    workspace = open_workspace(project, home, run_id, recipe, {"source": "text"})
    shutil.copytree(workspace.parent / "original/outputs", workspace / "outputs")
    with stage_cache._open(workspace) as repo:
        return [name for name in CACHED_STAGES if stage_cache._lookup(repo, name) is None]


def pretend(workspace: Path, stage: str) -> None:
    inputs = [workspace / "outputs" / name / "record.json" for name in INPUTS[stage]]
    content = b"".join(path.read_bytes() for path in (workspace / "source.json", *inputs))
    folder = workspace / "outputs" / stage
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(hashlib.sha256(content).hexdigest())


def add_a_line(path: Path, line: str = "# changed\n") -> None:
    path.write_text(path.read_text() + line)


def test_nothing_changed_reruns_nothing(project):
    assert rerun(project, "again") == []


def test_one_byte_of_the_source_reruns_everything(project):
    assert rerun(project, "source", source="texT") == list(CACHED_STAGES)


@pytest.mark.parametrize(
    ("modules", "stages"),
    [
        (["pipelines/data/reading/readers.py"], ["preprocess"]),
        (["ray_jobs/preprocess.py"], ["preprocess"]),
        (["pipelines/validation/suites.py"], ["validate"]),
        (["pipelines/training/trainer.py"], ["train"]),
        (["pipelines/evaluation/baselines.py"], ["evaluate"]),
        (
            [
                "pipelines/evaluation/gate.py",
                "pipelines/services/platform.py",
                "dags/llm_pipeline.py",
            ],
            [],
        ),
        (["pipelines/core/storage.py"], list(CACHED_STAGES)),
    ],
)
def test_a_line_of_a_module_reruns_the_stages_that_import_it(project, modules, stages):
    for module in modules:
        add_a_line(project / module)
    assert stale(project, f"module-{Path(modules[0]).stem}") == stages


@pytest.mark.parametrize(
    ("overrides", "stages"),
    [
        (["data.tokenizer.vocab_size=300"], ["preprocess"]),
        (["validation.min_documents=3"], ["validate"]),
        (["train.lr=0.1"], ["train"]),
        (["data.sequence_length=32"], ["train"]),
        (["resources.workers=1"], ["train"]),
        (["evaluate.max_bytes=7"], ["evaluate"]),
        (["seed=1"], ["train", "evaluate"]),
        (["register.model_name=other", "name=other"], []),
    ],
)
def test_a_parameter_reruns_the_stages_that_read_it(project, overrides, stages):
    assert stale(project, f"parameter-{overrides[0].replace('=', '-')}", *overrides) == stages


def test_other_weights_in_the_folder_that_training_starts_from_rerun_it(project):
    base = project.parent / "base"
    base.mkdir(exist_ok=True)
    (base / "model.safetensors").write_text("1")
    rerun(project, "base-1", f"model.init_from={base}")
    assert stale(project, "base-2", f"model.init_from={base}") == []
    (base / "model.safetensors").write_text("2")
    assert stale(project, "base-3", f"model.init_from={base}") == ["train"]


def test_an_edited_file_of_bias_templates_reruns_evaluate(project):
    own = project.parent / "own.json"
    own.write_bytes((project / TEMPLATES).read_bytes())
    chosen = f"evaluate.bias.templates={own}"
    rerun(project, "templates-1", chosen)
    assert stale(project, "templates-2", chosen) == []
    own.write_text(own.read_text().replace("My {term}", "Our {term}"))
    assert stale(project, "templates-3", chosen) == ["evaluate"]
    own.write_text(own.read_text().replace("{term}", "he", 1))
    with pytest.raises(UserError, match=r"own\.json: set `gender en`: template .* needs \{term\}"):
        stale(project, "templates-4", chosen)
    add_a_line(project / TEMPLATES, "\n")
    assert stale(project, "templates-5") == ["evaluate"]


def test_a_package_of_the_lock_reruns_everything(project):
    add_a_line(project / "requirements.lock", "one-more==1.0\n")
    assert stale(project, "lock") == list(CACHED_STAGES)
