"""`penstock init`: what a team finds in its new project."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import typer
import yaml
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.commands.options import user_name
from pipelines.core.errors import UserError
from pipelines.core.product import LOCK, VERSION, is_project
from pipelines.core.settings import PROJECT
from tests.infra.runbook import PROJECTS, commands

PENSTOCK = Path(sys.prefix) / "bin" / "penstock"
WHEEL = f"wheels/penstock-{VERSION}-py3-none-any.whl"


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", folder, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def init(folder: Path) -> str:
    return CliRunner().invoke(app, ["init", str(folder)], catch_exceptions=False).stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project in a folder with a space in its name; do not change it."""
    folder = tmp_path_factory.mktemp("team") / "Our models"
    init(folder)
    return folder


def test_a_project_is_a_git_repository_with_all_that_a_team_needs(project):
    assert set(git(project, "ls-files").splitlines()) == {
        ".github/workflows/check.yml",
        ".gitignore",
        "README.md",
        "pyproject.toml",
        "recipes/first.yaml",
        "recipes/recipe.schema.json",
        LOCK,
    }
    assert git(project, "status", "--porcelain") == ""
    assert is_project(project)
    assert (project / LOCK).read_bytes() == (PROJECT / LOCK).read_bytes()
    written = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert written["name"] == "our-models"
    assert written["dependencies"] == [f"penstock[laptop]=={VERSION}"]


def test_data_and_the_platforms_files_are_not_in_git(project):
    for name in ("data/corpus.txt", ".penstock/runs", ".venv/bin"):
        assert git(project, "check-ignore", name).strip() == name


def test_an_editor_finds_the_schema_and_checks_the_first_recipe_by_it(project):
    text = (project / "recipes" / "first.yaml").read_text()
    link = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    schema = json.loads((project / "recipes" / link[1]).read_text())
    recipe = yaml.safe_load(text)
    jsonschema.validate(recipe, schema)
    for mistake in ({"modle": {}}, {"train": {"steps": "many"}}, {"schedule": {"corn": "* *"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(recipe | mistake, schema)


def test_what_the_first_recipe_leaves_commented_out_is_right_too(project):
    text = (project / "recipes" / "first.yaml").read_text()
    whole = re.sub(r"^  # (\w+: )", r"  \1", text, flags=re.MULTILINE)
    schema = json.loads((project / "recipes" / "recipe.schema.json").read_text())
    recipe = yaml.safe_load(whole)
    jsonschema.validate(recipe, schema)
    assert {"cron", "dataset", "model", "refresh"} < recipe["schedule"].keys()


def test_what_ci_runs_exists_and_passes(project):
    workflow = yaml.safe_load((project / ".github/workflows/check.yml").read_text())
    steps = workflow["jobs"]["recipes"]["steps"]
    *install, check = (shlex.split(step["run"]) for step in steps if "run" in step)
    assert f"{WHEEL}[laptop]" in install[-1]
    for command in install:
        assert (project / command[command.index("--constraint") + 1]).is_file()
    penstock, *arguments = check
    assert penstock == "penstock"
    done = subprocess.run([PENSTOCK, *arguments], cwd=project, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "ok     first", "")


def test_a_recipe_with_a_mistake_stops_ci(project, tmp_path):
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(project), str(clone))
    recipe = clone / "recipes" / "first.yaml"
    recipe.write_text(recipe.read_text().replace("steps: 600", "steps: many"))
    done = subprocess.run([PENSTOCK, "recipes", "check"], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 2
    assert "train.steps" in done.stderr


def test_the_readme_has_the_commands_of_the_docs_and_only_those_that_there_are(project):
    text = (project / "README.md").read_text()
    install = commands("Begin", "Install", page=PROJECTS).partition("cd our-models\n")[2]
    block = text.partition("\n\n    ")[2].partition("\n    eval")[0]
    assert [line.strip() for line in block.splitlines()] == install.splitlines()
    assert f"{WHEEL}[laptop]" in install
    named = re.findall(r"^    penstock (\w+)", text, re.MULTILINE)
    assert set(named) <= typer.main.get_command(app).commands.keys()
    assert {"up", "run", "recipes", "down"} <= set(named)


def test_a_folder_that_is_not_empty_is_refused_and_keeps_what_it_has(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    init(folder)  # an empty one is taken
    before = git(folder, "rev-parse", "HEAD")
    (folder / "recipes" / "mine.yaml").write_text("name: mine\n")
    with pytest.raises(UserError, match=r"models exists and is not empty; name a folder that"):
        init(folder)
    assert git(folder, "rev-parse", "HEAD") == before
    assert (folder / "recipes" / "mine.yaml").is_file()
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(UserError, match="file exists and is not empty"):
        init(file)
    assert file.read_text() == "text"
    assert {path.name for path in tmp_path.iterdir()} == {"models", "file"}


def test_the_commit_is_the_users_where_git_knows_one(tmp_path, monkeypatch):
    settings = tmp_path / "settings"
    settings.write_text("[user]\n    name = Ada\n    email = ada@example.org\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    init(tmp_path / "models")
    assert git(tmp_path / "models", "log", "--format=%an %ae") == "Ada ada@example.org\n"


@pytest.mark.parametrize("known", ["", "[user]\n    email = ada@example.org\n    name =\n"])
def test_a_machine_without_a_git_identity_is_no_obstacle(known, tmp_path, monkeypatch):
    settings = tmp_path / "settings"
    settings.write_text(f"[user]\n    useConfigOnly = true\n{known}")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    for part in ("AUTHOR", "COMMITTER"):
        monkeypatch.delenv(f"GIT_{part}_NAME", raising=False)
        monkeypatch.delenv(f"GIT_{part}_EMAIL", raising=False)
    init(tmp_path / "models")
    who = user_name()
    assert git(tmp_path / "models", "log", "--format=%an %ae") == f"{who} {who}@localhost\n"
    assert "user" not in (tmp_path / "models" / ".git" / "config").read_text()


def test_the_wheel_that_penstock_was_installed_from_goes_with_the_project(tmp_path, monkeypatch):
    wheel = tmp_path / "two words" / "penstock-7.8.9-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"a wheel")
    installed = tmp_path / "penstock-7.8.9.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.4\nName: penstock\nVersion: 7.8.9\n")
    (installed / "direct_url.json").write_text(json.dumps({"url": wheel.as_uri()}))
    monkeypatch.syspath_prepend(tmp_path)
    told = init(tmp_path / "models")
    assert "make dist" not in told
    name = "wheels/penstock-7.8.9-py3-none-any.whl"
    assert name in git(tmp_path / "models", "ls-files").splitlines()
    assert (tmp_path / "models" / name).read_bytes() == b"a wheel"
    assert f"{name}[laptop]" in (tmp_path / "models" / "README.md").read_text()


def test_without_a_wheel_one_line_says_where_it_belongs(tmp_path):
    told = init(tmp_path / "our models").splitlines()
    assert f"copy the wheel that `make dist` builds of Penstock to {WHEEL} in it" in told
    assert told[-1] == f"next: cd '{tmp_path}/our models'; its README.md says how to begin"


def test_a_command_whose_packages_are_not_installed_says_so_in_one_line(project, tmp_path):
    (tmp_path / "psutil.py").write_text("raise ModuleNotFoundError(name='psutil')")
    done = subprocess.run(
        [PENSTOCK, "up"],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: this command needs the package psutil: install Penstock's wheel with its extra "
        "`laptop`, as the README.md of your project says\n"
    )
