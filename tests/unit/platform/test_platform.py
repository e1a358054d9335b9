"""What of `up` and `down` needs no platform: whose turn it is, and what code they look at."""

import fcntl
import threading
from pathlib import Path

import pytest

from pipelines.core.settings import Settings, load_settings
from pipelines.platform import platform


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


@pytest.mark.parametrize("path", ["pipelines/a.py", "pipelines/stages/b.py", "dags/c.py"])
def test_new_code_is_noticed_wherever_a_dag_may_import_it(path: str, tmp_path: Path) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text("a = 1")
    before = platform.code_hash(tmp_path)
    assert platform.code_hash(tmp_path) == before
    file.write_text("a = 2")
    changed = platform.code_hash(tmp_path)
    file.rename(file.with_name("renamed.py"))
    assert len({before, changed, platform.code_hash(tmp_path)}) == 3
