"""One real platform for the whole session, on free ports, in a folder whose path has a space."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import psutil
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from pipelines.core.machine import free_port
from pipelines.core.settings import PROJECT, Settings, load_settings
from pipelines.platform.environment import client_variables
from pipelines.platform.preflight import check_ports
from pipelines.platform.supervisor import processes_of
from tests.processor_time import limit

PENSTOCK = Path(sys.prefix) / "bin" / "penstock"
PORT_VARIABLES = (
    "PENSTOCK_AIRFLOW_PORT",
    "PENSTOCK_MLFLOW_PORT",
    "PENSTOCK_RAY_PORT",
    "PENSTOCK_RAY_GCS_PORT",
)
# Set in a shell that ran `eval "$(penstock env)"`: they would point the tests at that platform.
FOREIGN = ("MLFLOW_TRACKING_URI", "PENSTOCK_AIRFLOW_URL", "RAY_API_SERVER_ADDRESS")


# A busy machine has moments in which one example takes long.
hypothesis.settings.register_profile("penstock", deadline=None)
hypothesis.settings.load_profile("penstock")

# Where tests need the session's platform.
ON_THE_PLATFORM = ("tests/e2e/", "tests/platform/", "tests/faults/")


# What shares a cluster or an engine of containers, by how its files begin.
OF_INFRASTRUCTURE = {
    "tests/infra/test_compose": "containers",
    "tests/infra/test_images": "containers",
    "tests/infra/test_kubernetes": "kubernetes",
}


class OnePlatform(LoadScopeScheduling):
    """Of several processes one has all tests that share what is slow to raise, else a file's."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(ON_THE_PLATFORM):
            return "platform"
        shared = (name for begin, name in OF_INFRASTRUCTURE.items() if nodeid.startswith(begin))
        return next(shared, nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OnePlatform:
    """Instead of what `--dist` names."""
    return OnePlatform(config, log)


@dataclass(frozen=True)
class Platform:
    """A platform that `penstock up` started."""

    settings: Settings
    environment: dict[str, str]  # for a command of the tests

    @property
    def runtime(self) -> Path:
        """The folder of its sockets, new with each `penstock up`."""
        return Path((self.settings.home / "services" / "runtime").read_text())

    def penstock(self, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run the command against this platform."""
        return subprocess.run(
            [PENSTOCK, *arguments],
            env=self.environment,
            cwd=PROJECT,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def processes(self) -> set[psutil.Process]:
        """All that `up` started, to the last grandchild."""
        return processes_of(self.runtime)


@contextmanager
def running_platform(parent: Path | None = None, **variables: str) -> Iterator[Platform]:
    """Airflow, Ray and MLflow, really up, with variables for `penstock up`.

    Their home is in the system's temporary folder, or in `parent`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="penstock test ", dir=parent) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        home = Path(folder) / "home"
        for variable in FOREIGN:
            patch.delenv(variable, raising=False)
        patch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
        patch.setenv("PENSTOCK_HOME", str(home))
        for variable in PORT_VARIABLES:
            patch.setenv(variable, str(free_port()))
        settings = load_settings()
        environment = dict(os.environ) | client_variables(settings) | variables
        # The platform is its user's, the environment is not: later tests see their own.
        patch.undo()
        up = subprocess.run([PENSTOCK, "up"], env=environment, capture_output=True, text=True)
        try:
            assert up.returncode == 0, f"{up.stderr}\n{_last_lines(home)}"
            platform = Platform(settings, environment)
            yield platform
            runtime = platform.runtime
        finally:
            began = time.monotonic()
            subprocess.run([PENSTOCK, "down"], env=environment, check=True)
            seconds = time.monotonic() - began
        assert_nothing_is_left(settings, runtime, seconds)


@pytest.fixture(scope="session")
def platform() -> Iterator[Platform]:
    """One for all tests; takes most of a minute once a session."""
    with running_platform() as platform:
        yield platform


def _last_lines(home: Path) -> str:
    logs = sorted((home / "services").glob("*.log"))
    return "\n".join(f"{log}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs)


def assert_nothing_is_left(settings: Settings, runtime: Path, seconds: float) -> None:
    """After `down`: no process, no temporary folder, no port, and not a minute's wait for it."""
    assert not processes_of(runtime)
    assert not runtime.exists()
    check_ports(settings)
    assert seconds < limit(20)  # 15 on a machine with nothing else to do


@pytest.fixture
def platform_variables(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> Platform:
    """The platform, with this process's environment pointing at it for one test."""
    for variable, value in client_variables(platform.settings).items():
        monkeypatch.setenv(variable, value)
    return platform
