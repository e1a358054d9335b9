"""What a change reruns, by the project's own dvc.yaml; stages only pretend to work.

A stage's pretended output depends on its inputs' bytes, as a real one does.
"""

import hashlib
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from pipelines.core.errors import UserError
from pipelines.planning.precision_rule import Device, settle_precision
from pipelines.recipe.recipe_files import load_recipe
from pipelines.run.usage import cached, metered
from pipelines.stage_cache import dvc_cache
from pipelines.stage_cache.explanation import explain, explain_past, keep
from pipelines.stage_cache.open_workspace import open_workspace
from pipelines.stages.stage import find_stage
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


def rerun(
    project: Path, run_id: str, *overrides: str, source: str = "text", device: Device | None = None
) -> list[str]:
    """The stages that a run has to run, each of which is then in the cache."""
    recipe = load_recipe("debug", overrides)
    if device:
        recipe = settle_precision(recipe, device)
    home = project.parent / "home"
    workspace = open_workspace(project, home, run_id, recipe, {"source": source})
    ran = []
    for stage in CACHED_STAGES:
        if not dvc_cache.restore(workspace, stage):
            pretend(workspace, stage)
            dvc_cache.commit(workspace, stage)
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
    with dvc_cache._open(workspace) as repo:
        return [name for name in CACHED_STAGES if dvc_cache._lookup(repo, name) is None]


def pretend(workspace: Path, stage: str) -> None:
    inputs = [workspace / "outputs" / name / "record.json" for name in find_stage(stage).inputs]
    content = b"".join(path.read_bytes() for path in (workspace / "source.json", *inputs))
    folder = workspace / "outputs" / stage
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(hashlib.sha256(content).hexdigest())


def add_a_line(path: Path, line: str = "# changed\n") -> None:
    path.write_text(path.read_text() + line)


def test_nothing_changed_reruns_nothing(project):
    assert rerun(project, "again") == []


def test_auto_on_another_kind_of_device_is_another_key(project):
    cpu, gpu = Device(is_cpu=True, has_bf16=False), Device(is_cpu=False, has_bf16=True)
    assert rerun(project, "on a cpu", device=cpu) == ["train"]
    assert rerun(project, "on a gpu", device=gpu) == ["train"]
    assert rerun(project, "on a cpu again", device=cpu) == []
    by_hand = ("train.precision=bf16", "train.compile=true")
    assert rerun(project, "as on a gpu", *by_hand) == []


def test_one_byte_of_the_source_reruns_everything(project):
    assert rerun(project, "source", source="texT") == list(CACHED_STAGES)


@pytest.mark.parametrize(
    ("changed", "stages"),
    [
        ({"pipelines/data/reading/text_readers.py": "plan_reads"}, ["preprocess"]),
        ({"pipelines/validation/suites.py": "shards_suite"}, ["validate"]),
        ({"pipelines/training/trainer.py": "Trainer"}, ["train"]),
        ({"pipelines/evaluation/baselines.py": "xz_bits_per_byte"}, ["evaluate"]),
        ({"pipelines/core/storage.py": "write_json"}, list(CACHED_STAGES)),
        (
            {
                "pipelines/core/log.py": "set_up_logging",
                "pipelines/evaluation/gate.py": "decide",
                "pipelines/platform/platform.py": "up",
                "pipelines/tracking/tracked_run.py": "open_run",
                "ray_jobs/stage_job.py": "main",
                "dags/llm_pipeline.py": "dag",
            },
            [],
        ),
    ],
)
def test_a_function_reruns_the_stages_that_reach_it(project, changed, stages):
    for path, name in changed.items():
        add_a_line(project / path, f"{name} = print\n")
    assert stale(project, f"code-{Path(next(iter(changed))).stem}") == stages


def test_comments_prices_and_a_stages_help_rerun_nothing(project):
    for path in (project / "pipelines").rglob("*.py"):
        add_a_line(path)
    prices = project / "pipelines/planning/prices.yaml"
    prices.write_text(prices.read_text().replace("h100: 3", "h100: 4"))
    assert stale(project, "comments") == []


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


@pytest.mark.parametrize(
    ("package", "stages"),
    [("ruff", []), ("apache-airflow", []), ("torch", ["train", "evaluate"])],
)
def test_a_package_reruns_the_stages_that_import_it(project, package, stages):
    lock = project / "requirements.lock"
    lines = lock.read_text().splitlines()
    lock.write_text(
        "\n".join(f"{package}==0.1" if line.startswith(f"{package}==") else line for line in lines)
    )
    assert stale(project, f"package-{package}") == stages


def told(project: Path, run_id: str, *overrides: str) -> str:
    """What is said of a run before it begins."""
    recipe = load_recipe("debug", overrides)
    home = project.parent / "home"
    workspace = open_workspace(project, home, run_id, recipe, {"source": "text"})
    lines = [line for each in explain(workspace, home / "runs") for line in each.lines()]
    assert not (workspace / "outputs").exists()  # nothing is checked out
    return "\n".join(lines)


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_nothing_that_changed_is_said_to_come_from_the_cache(project):
    lines = told(project, "told-nothing").splitlines()
    assert lines[:4] == [f"{name:<10}  comes from the cache" for name in CACHED_STAGES]
    assert lines[4:] == ["register    runs", "    this stage runs in every run"]


def test_a_function_that_changed_is_shown_with_its_diff(project):
    replace(project / "pipelines/training/schedule.py", "= rate\n", "= 0.4 * rate\n")
    said = told(project, "told-function")
    assert "train       runs\n    compared with " in said
    assert "\n    pipelines.training.schedule:set_learning_rate changed\n" in said
    assert '-        group["lr"] = rate' in said
    assert '+        group["lr"] = 0.4 * rate' in said
    assert "evaluate    runs, unless the earlier stages give the same outputs as before" in said


def test_a_parameter_a_file_and_a_package_are_named_with_both_values(project):
    add_a_line(project / TEMPLATES, "\n")
    lock = project / "requirements.lock"
    (torch,) = [line for line in lock.read_text().splitlines() if line.startswith("torch==")]
    replace(lock, f"{torch}\n", "torch==0.1\n")
    overrides = ["data.dedup.kind=minhash", "validation.min_documents=3"]
    said = told(project, "told-parameter", *overrides).splitlines()
    assert "    data.dedup.kind: exact -> minhash" in said
    assert "    validation.min_documents: 2 -> 3" in said
    assert f"    the package torch: {torch.removeprefix('torch==')} -> 0.1" in said
    assert f"    {TEMPLATES} changed" in said


def test_a_run_of_the_past_says_what_ran_and_why(project):
    assert rerun(project, "past", "train.lr=0.2") == ["train"]  # whose result is the same
    workspace = project.parent / "home/runs/past"
    for stage in CACHED_STAGES:
        if stage == "train":
            with metered(workspace, stage):
                time.sleep(0.01)
        else:
            cached(workspace, stage)
    found = {each.stage: each for each in explain_past(workspace, workspace.parent)}
    assert found["preprocess"].cached
    assert found["train"].because[1].startswith("train.lr: ")


def test_a_kept_result_is_taken_under_its_old_key_and_never_found_by_another_run(project):
    rerun(project, "before-kept")  # the newest, whatever other tests have run
    replace(project / "pipelines/training/schedule.py", "= rate\n", "= 0.3 * rate\n")
    runs = project.parent / "home/runs"
    workspace = open_workspace(
        project, runs.parent, "kept", load_recipe("debug"), {"source": "text"}
    )
    (line,) = keep(workspace, runs, ["train"], who="ann@host", why="only a comment")
    assert line.startswith("train is kept from ")
    assert line.endswith(" for ann@host: only a comment")
    assert [each.cached for each in explain(workspace, runs)] == [True, True, True, True, False]
    for stage in CACHED_STAGES:
        assert dvc_cache.restore(workspace, stage)
    noted = dvc_cache.kept(workspace)["train"]
    assert noted["changed"][0].startswith("pipelines.training.schedule:set_learning_rate changed")
    assert rerun(project, "after-kept") == ["train"]


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ("register", "--keep register: the stages whose results can be kept are preprocess, "),
        ("trian", "--keep trian: the stages"),
    ],
)
def test_what_cannot_be_kept_is_one_line(project, stage, line):
    runs = project.parent / "home/runs"
    workspace = open_workspace(
        project, runs.parent, f"not-kept-{stage}", load_recipe("debug"), {"source": "text"}
    )
    with pytest.raises(UserError, match=line):
        keep(workspace, runs, [stage], who="ann", why="x")


def test_another_recipes_result_is_not_kept(project):
    runs = project.parent / "home/runs"
    recipe = load_recipe("debug", ["name=quite-another"])
    workspace = open_workspace(project, runs.parent, "another", recipe, {"source": "text"})
    with pytest.raises(UserError, match="no earlier run of this recipe has a result of it"):
        keep(workspace, runs, ["train"], who="ann", why="x")
