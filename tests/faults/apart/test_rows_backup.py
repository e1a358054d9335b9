"""A machine is lost in the middle of a training, and its backup goes on with it elsewhere."""

import shutil
import time
from pathlib import Path

import pytest

from pipelines.platform.backup import PASSPHRASE
from tests.conftest import Platform, running_platform
from tests.faults import checks
from tests.faults.pipeline_run import CHECKPOINT_EVERY, MIDDLE, PipelineRun

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]


def test_row_23_a_backup_in_mid_training_goes_on_elsewhere(tmp_path: Path) -> None:
    """The other machine is one where the home is gone, and all processes with it."""
    copy = tmp_path / "a backup"
    with running_platform(**{PASSPHRASE: "correct horse"}) as platform:
        like = PipelineRun(platform, "penstock-unhurt")
        assert like.wait_for_end() == "success", like.logs()
        run = PipelineRun(platform, "penstock-backed-up")
        run.wait_for_step(MIDDLE)
        penstock(platform, "backup", str(copy))
        assert run.task_state("train") in ("running", "deferred")
        penstock(platform, "down")
        shutil.move(platform.settings.home, tmp_path / "lost")

        penstock(platform, "restore", str(copy))
        saved = run.step
        assert saved >= MIDDLE
        penstock(platform, "up")
        while run.state == "running":
            assert run.step >= CHECKPOINT_EVERY, "it began anew"
            time.sleep(0.5)
        assert run.state == "success", run.logs()
        checks.same_weights(run, like)
        checks.one_mlflow_run(run)
        checks.one_version(run)


def penstock(platform: Platform, *arguments: str) -> None:
    """Run a command that must succeed."""
    done = platform.penstock(*arguments, timeout=600)
    assert done.returncode == 0, done.stderr
