"""Row 33: the machine of a whole platform loses its power in a run.

All processes are gone at once, and with them what none of them had synced: of the run, of Airflow's
and MLflow's databases, of the stage cache. The temporary folder is empty, as after a restart.
"""

import shutil
from collections.abc import Iterator

import pytest

from pipelines.platform.supervisor import processes_of
from tests.conftest import Platform, running_platform
from tests.faults.processes import kill
from tests.image_disk import ImageDisk, image_disk

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

_DISK_MIB = 8 << 10


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageDisk]:
    with image_disk(tmp_path_factory.mktemp("power"), _DISK_MIB) as disk:
        yield disk


@pytest.fixture(scope="module")
def platform(disk: ImageDisk) -> Iterator[Platform]:
    with running_platform(disk.place) as platform:
        yield platform


@pytest.mark.parametrize("cut", range(2), ids=["first", "second"])
def test_row_33_the_power_of_a_platforms_machine(scenario, reference, platform, disk, cut):
    run = scenario.start()
    run.wait_for_step()
    runtime = platform.runtime
    # The triggerer that waited for the job is told of, as it was another's work to notice.
    with run.fault("service lost"), run.fault("cluster lost"):
        disk.lose_power()
        while found := processes_of(runtime):  # some start others until they find no disk
            kill(*found)
        shutil.rmtree(runtime)
        disk.power_up()
        up = platform.penstock("up", timeout=600)
        assert up.returncode == 0, up.stderr
    scenario.ends_well(run, like=reference)
