"""The driver against torch's CUDA, by NVIDIA's rules."""

from dataclasses import replace

import pytest
import torch

from pipelines.doctor.driver_and_cuda import assess_container_devices, assess_driver, torch_build
from pipelines.doctor.nvidia_smi import Smi, fix_of, parse_smi
from tests.unit.doctor.recordings import recorded, told

A100 = parse_smi(recorded("smi_a100_sxm4.xml"))  # driver 535.54.03, CUDA 12.2


def machine(driver: str, cuda: str, **gpu: str) -> Smi:
    return Smi(driver, cuda, tuple(replace(each, **gpu) for each in A100.gpus))


@pytest.mark.parametrize(
    ("found", "built_with", "state", "words"),
    [
        (A100, "12.1", "ok", "knows CUDA 12.2"),
        (A100, "11.8", "ok", "knows CUDA 12.2"),  # every driver runs what is older
        (A100, "12.8", "warning", "minor version compatibility"),
        (A100, "13.0", "problem", "needs driver 580 or newer"),
        (machine("450.51.05", "11.0"), "11.8", "problem", "needs driver 450.80.2"),
        (machine("535.54.03", "13.0"), "13.0", "ok", "forward compatibility"),
        (machine("535.54.03", "13.0", brand="GeForce"), "13.0", "problem", "CUDA error 804"),
        (machine("580.65.06", "13.0"), "13.0", "ok", "knows CUDA 13.0"),
        (machine("580.65.06", "13.0"), "13.2", "warning", "minor version compatibility"),
        (machine("580.65.06", "13.0", architecture="Volta"), "13.0", "problem", "Volta"),
        (machine("580.65.06", "13.0", architecture="Volta"), "12.8", "ok", "torch"),
        (machine("700.1", "15.0"), "14.1", "warning", "does not know"),
        (A100, None, "problem", "has no CUDA"),
        (machine("535.54.03", ""), "12.1", "problem", "libcuda.so.1 is not here"),
    ],
)
def test_the_rules(found, built_with, state, words):
    ((told_state, saw),) = told(assess_driver(found, built_with, "2.13.0"))
    assert (told_state, words in saw) == (state, True), saw


@pytest.mark.parametrize(("brand", "package"), [("NVIDIA", True), ("GeForce", False)])
def test_forward_compatibility_is_offered_only_where_it_works(brand, package):
    seen = assess_driver(machine("535.54.03", "12.2", brand=brand), "13.0", "2.13.0+cu130")
    assert ("cuda-compat-13-0" in seen.fix) == package
    assert "torch of CUDA 12.2 or older" in seen.fix


def test_torchs_build_is_what_torch_says():
    assert torch_build() == (torch.version.cuda, torch.__version__)


@pytest.mark.parametrize(
    ("inside", "uvm", "faults"),
    [(True, False, ["problem"]), (True, True, []), (False, False, [])],
)
def test_a_container_must_be_given_the_device_of_cuda(inside, uvm, faults):
    assert [state for state, _ in told(assess_container_devices(inside, uvm))] == faults


def test_a_driver_that_was_updated_under_its_module_is_known():
    words = recorded("smi_driver_mismatch.txt")
    assert "reboot" in fix_of(words, "")
    assert "reboot" in fix_of(recorded("container_cli_mismatch.txt"), "")
    assert fix_of("something else", "by hand") == "by hand"


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (
            "Unable to determine the device handle for GPU0000:07:00.0: Unknown Error",
            "power-cycle it",
        ),
        (
            "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.  Reboot the "
            "system to recover this GPU",
            "power-cycle it",
        ),
        ("No devices were found", "dmesg | grep NVRM"),
        ("Failed to initialize NVML: Unknown Error", "daemon-reload"),
        ("WARNING: infoROM is corrupted at gpu 0000:0B:00.0", "nvidia-smi -r"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", "install"),
    ],
)
def test_what_nvidia_smi_says_when_it_fails_has_a_fix(words, fix):
    assert fix in fix_of(words, "")
