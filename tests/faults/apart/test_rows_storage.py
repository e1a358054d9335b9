"""Rows 26 to 28: no inodes, a slow disk, and power cuts, under a training alone on its disk.

What is written there is what a platform's job writes: data, checkpoints, the curve and the model.
"""

import json
import os
import random
import time

import pytest

from pipelines.run.logbook import read_logbook
from tests.faults.pipeline_run import SEED, until
from tests.faults.small_disk import out_of_inodes, small_disk
from tests.faults.training_process import LIMIT_S, Training
from tests.image_disk import image_disk

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

FULL_S = 30
MIB = 1 << 20
CUTS = 4


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory) -> tuple[str, float]:
    """The weights of the run that nothing befell, and its seconds."""
    training, began = Training(tmp_path_factory.mktemp("unhurt")), time.monotonic()
    training.finish()
    return training.model(), time.monotonic() - began


def told(training: Training) -> list[str]:
    return [each.kind for each in read_logbook(training.workspace)]


def test_row_26_the_inode_table_is_full(unhurt, tmp_path, record_property):
    with small_disk(tmp_path / "disk", 200, inodes=500) as disk:
        training = Training(disk)
        with training.process() as process:
            until(lambda: len(training.history) > 10, "training", LIMIT_S)
            with out_of_inodes(disk):
                until(lambda: "storage" in told(training), "the entry in the logbook", LIMIT_S)
                time.sleep(FULL_S)
                assert process.poll() is None
            process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, training.said[-5000:]
        assert training.model() == unhurt[0]
        assert told(training).count("storage") == 1
        line = training.why()[0]
        assert line.startswith("Storage could not be written:")
        assert "no inodes" in line, line
        checks = ["success", "weights identical", "told once", f"why: {line}"]
        record_property("checks", json.dumps(checks))


def test_row_27_a_disk_that_writes_1_mb_a_second(unhurt, tmp_path, record_property):
    with image_disk(tmp_path, 300) as disk:
        training = Training(disk.place)
        with training.process() as process:
            until(lambda: len(training.history) > 10, "training", LIMIT_S)
            with disk.slow(MIB):
                process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, training.said[-5000:]
        assert training.model() == unhurt[0]
        record_property("checks", json.dumps(["success", "weights identical", training.why()[0]]))


def test_row_28_power_cuts(unhurt, tmp_path, record_property):
    """At random moments all processes end, and what was not synced is lost."""
    seed = int(os.environ.get(SEED, "0"))
    moments = [random.Random(f"{seed} {cut}").uniform(0, unhurt[1]) for cut in range(CUTS)]
    print(f"{SEED}={seed}: cuts after {[round(each, 2) for each in moments]} s")
    with image_disk(tmp_path, 300) as disk:
        training = Training(disk.place)
        for moment in moments:
            with training.process() as process:
                time.sleep(moment)
                disk.lose_power()
                process.kill()
            disk.power_up()
        training.finish()
        assert training.model() == unhurt[0], training.said[-5000:]
        checks = ["success", "weights identical", f"{CUTS} cuts", training.why()[0]]
        record_property("checks", json.dumps(checks))
