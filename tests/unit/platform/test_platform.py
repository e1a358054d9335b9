"""What of `up` and `down` needs no platform: whose turn it is, and what code they look at."""

import fcntl
import json
import subprocess
import threading
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

from pipelines.core import product
from pipelines.core.errors import UserError
from pipelines.core.settings import Settings, load_settings
from pipelines.platform import platform
from pipelines.platform.home_versions import take_over
from pipelines.platform.parts import reconciled_path


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "services").mkdir(parents=True)
    return load_settings()


def test_a_down_that_waited_ends_what_is_there_when_its_turn_comes(
    settings: Settings, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    runtime_file = settings.home / "services" / "runtime"
    for runtime in (old, new):
        runtime.mkdir()
    runtime_file.write_text(str(old))
    with (settings.home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=platform.down, args=[settings])
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        runtime_file.write_text(str(new))  # another `up`
    waiting.join(20)
    assert (old.exists(), new.exists(), runtime_file.exists()) == (True, False, False)
    assert not platform.down(settings)


def test_a_home_that_a_later_version_has_used_is_left_as_it_is(settings: Settings) -> None:
    take_over(settings.home)
    noted = settings.home / "versions.json"
    versions = json.loads(noted.read_text())
    assert versions["mlflow"] == version("mlflow")
    take_over(settings.home)
    noted.write_text(json.dumps(versions | {"mlflow": "99.1"}))
    before = {*settings.home.rglob("*")}
    with pytest.raises(UserError, match=r"was last used by mlflow 99.1, and .* install the later"):
        platform.up(settings, lambda *_: None)
    assert json.loads(noted.read_text())["mlflow"] == "99.1"
    assert {*settings.home.rglob("*")} - before <= {settings.home / "lock"}
    noted.write_text("{}")
    with pytest.raises(UserError, match=r"versions.json: penstock: .* it is damaged"):
        take_over(settings.home)


@pytest.mark.parametrize("lives", [True, False])
def test_a_home_of_another_machine_is_left_to_it_while_its_platform_lives(
    lives: bool, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "_SILENT_S", 1.0)
    runtime_file = settings.home / "services" / "runtime"
    runtime_file.write_text(str(tmp_path / "of the other's own disk"))
    (settings.home / "services" / "host").write_text("gpu-7")
    touched = reconciled_path(settings)
    touched.touch()
    over = threading.Event()

    def live() -> None:
        while not over.wait(0.05):
            touched.touch()

    other = threading.Thread(target=live)
    if lives:
        other.start()
        for act in (platform.down, partial(platform.up, on_ready=lambda *_: None)):
            with pytest.raises(UserError, match="belongs to the platform that is up on gpu-7"):
                act(settings)
        over.set()
        other.join()
        assert runtime_file.exists()
    else:
        assert platform.down(settings)
        assert not runtime_file.exists()


@pytest.mark.parametrize("path", ["pipelines/a.py", "pipelines/stages/b.py", "dags/c.py"])
def test_new_code_is_noticed_wherever_a_dag_may_import_it(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "PRODUCT", tmp_path)
    monkeypatch.setattr(product, "DAGS", tmp_path / "dags")
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text("a = 1")
    before = product.code_digest()
    assert product.code_digest() == before
    file.write_text("a = 2")
    changed = product.code_digest()
    file.rename(file.with_name("renamed.py"))
    assert len({before, changed, product.code_digest()}) == 3


@pytest.mark.parametrize(
    ("command", "told"),
    [("kill -ILL $$", "mlflow was ended by SIGILL while"), ("exit 3", "mlflow ended while")],
)
def test_a_part_that_dies_by_a_signal_is_named_with_the_signal(
    command: str, told: str, settings: Settings, tmp_path: Path
) -> None:
    services = settings.home / "services"
    config = tmp_path / "supervisord.conf"
    config.write_text(
        f"[supervisord]\nlogfile = {services}/{platform.SUPERVISOR_LOG}\nnodaemon = true\n"
        f"pidfile = {tmp_path}/pid\n[program:mlflow]\ncommand = sh -c '{command}'\n"
        "startretries = 0\nautorestart = false\n"
    )
    log = services / platform.SUPERVISOR_LOG
    with subprocess.Popen(
        [platform.BIN / "supervisord", "-c", config],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as supervisord:
        deadline = time.monotonic() + 20
        while not (log.is_file() and "exited: mlflow" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        supervisord.terminate()
    failure = platform._failure(settings, "mlflow", f"{platform._end_of(settings, 'mlflow')} while")
    assert str(failure).startswith(told)
