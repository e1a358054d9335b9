"""A home that the versions before have used: it is taken over, and there is a way back.

The older environment has an Airflow and an MLflow from before the ones of requirements.lock, whose
tables are not yet migrated to what these need.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.machine import free_port
from pipelines.platform.home_versions import Versions
from tests.conftest import FOREIGN, PORT_VARIABLES
from tests.project_copy import copy_project

OLDER = {
    "apache-airflow": "==3.3.0",
    "apache-airflow-core": "==3.3.0",
    "apache-airflow-task-sdk": "==1.3.0",
    "mlflow": "==3.16.1",
    "mlflow-skinny": "==3.16.1",
    "mlflow-tracing": "==3.16.1",
    "aiosqlite": "",  # whatever goes with them
}
pytestmark = pytest.mark.timeout(3000)
MODELS = ("models", "list", "--json")
NEWER = Path(sys.prefix) / "bin" / "penstock"


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """`penstock` in an environment of the older versions."""
    project = tmp_path / "older one"
    copy_project(project)
    lock = project / "requirements.lock"
    text = lock.read_text()
    for package, version in OLDER.items():
        text, count = re.subn(rf"(?m)^{package}==.*$", f"{package}{version}", text)
        assert count == 1, package
    lock.write_text(text)
    subprocess.run(["bash", "infra/bootstrap.sh"], cwd=project, check=True)
    git = ["git", "-C", project, "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "--all"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "older"], check=True)
    return project / ".venv/bin/penstock"


class Home:
    """A folder that one platform after the other uses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        foreign = {*FOREIGN, "RAY_AUTH_TOKEN_PATH"}
        self._environment = {key: value for key, value in os.environ.items() if key not in foreign}
        self._environment |= {each: str(free_port()) for each in PORT_VARIABLES}
        self._environment |= {
            "PENSTOCK_HOME": str(folder),
            "PENSTOCK_BACKUP_PASSPHRASE": "the passphrase of a test",
        }

    def call(self, penstock: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command in the project that the installed Penstock comes from."""
        return subprocess.run(
            [penstock, *words],
            cwd=penstock.parents[2],
            env=self._environment,
            capture_output=True,
            text=True,
        )

    def do(self, penstock: Path, *words: str | Path) -> str:
        """Run a command that must succeed."""
        done = self.call(penstock, *words)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def run_pipeline(self, penstock: Path, model: str) -> set[str]:
        """Start the platform, run the pipeline for one more model; return the models' names."""
        self.do(penstock, "up")
        try:
            self.do(penstock, "run", "--recipe", "debug", "--set", f"register.model_name={model}")
            return {each["name"] for each in json.loads(self.do(penstock, *MODELS))}
        finally:
            self.do(penstock, "down")

    @property
    def versions(self) -> dict[str, str]:
        """Those that used it last."""
        return json.loads((self.folder / "versions.json").read_text())


def test_a_home_of_older_versions_is_taken_over_and_there_is_a_way_back(tmp_path, older):
    home, backup = Home(tmp_path / "home"), tmp_path / "backup"
    assert home.run_pipeline(older, "before") == {"before"}
    at_first = home.versions
    home.do(older, "backup", backup)

    assert home.run_pipeline(NEWER, "after") == {"before", "after"}
    assert home.versions == Versions.installed().model_dump()
    assert home.versions != at_first

    refused = home.call(older, "up")
    assert refused.returncode == 2
    assert "was last used by airflow 3.3" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1

    home.folder.rename(tmp_path / "later")
    home.do(older, "restore", backup)
    assert home.run_pipeline(older, "again") == {"before", "again"}
    assert home.versions == at_first
