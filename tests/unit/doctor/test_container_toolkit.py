"""The container toolkit, from `nvidia-container-cli info`."""

import pytest

from pipelines.doctor.container_toolkit import judge
from tests.unit.doctor.recordings import recorded, told


@pytest.mark.parametrize(
    ("driver", "state", "saw"),
    [
        ("525.105.17", "ok", "containers get driver 525.105.17 and 1 GPU"),
        ("580.65.06", "problem", "the toolkit finds driver 525.105.17, nvidia-smi 580.65.06"),
    ],
)
def test_it_must_find_the_driver_that_runs(driver, state, saw):
    assert told(judge(recorded("container_cli_gtx1070.txt"), driver)) == [(state, saw)]
