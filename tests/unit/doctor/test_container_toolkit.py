"""The container toolkit, from `nvidia-container-cli info`."""

import pytest

from pipelines.doctor.container_toolkit import (
    assess_cdi,
    assess_container_toolkit,
    parse_cdi,
    parse_toolkit,
)
from tests.unit.doctor.recordings import recorded, told


@pytest.mark.parametrize(
    ("driver", "state", "saw"),
    [
        ("525.105.17", "ok", "containers get driver 525.105.17 and 1 GPU"),
        ("580.65.06", "problem", "the toolkit finds driver 525.105.17, nvidia-smi 580.65.06"),
    ],
)
def test_it_must_find_the_driver_that_runs(driver, state, saw):
    found = parse_toolkit(recorded("container_cli_gtx1070.txt"))
    assert told(assess_container_toolkit(found, driver)) == [(state, saw)]


@pytest.mark.parametrize(
    ("text", "state", "saw"),
    [
        (
            "nvidia.com/gpu=0\nnvidia.com/gpu=GPU-38ab400c\nnvidia.com/gpu=all\n",
            "ok",
            "containers get 2 GPUs by CDI: nvidia.com/gpu=0 …",
        ),
        ("nvidia.com/gpu=all\n", "warning", "nvidia-ctk knows no GPU: containers get none"),
        ("", "warning", "nvidia-ctk knows no GPU: containers get none"),
    ],
)
def test_the_base_package_alone_gives_gpus_by_cdi(text, state, saw):
    assert told(assess_cdi(parse_cdi(text))) == [(state, saw)]
