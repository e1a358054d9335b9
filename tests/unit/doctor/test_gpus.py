"""GPUs, from nvidia-smi's XML: healthy as recorded, and with one fault at a time."""

import pytest

from pipelines.doctor import gpus
from pipelines.doctor.findings import NotHereError
from pipelines.doctor.smi import parse_smi
from tests.unit.doctor.recordings import recorded, told

RTX, ADA, A100 = "smi_rtx3080.xml", "smi_rtx4000_ada.xml", "smi_a100_sxm4.xml"


def broken(name: str, *changes: tuple[str, str]) -> str:
    text = recorded(name)
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def test_what_the_driver_says_is_read():
    machine = parse_smi(recorded(ADA))
    assert (machine.driver, machine.cuda) == ("595.84", "13.2")
    (gpu,) = machine.gpus
    assert gpu.name == "NVIDIA RTX 4000 SFF Ada Generation"
    assert (gpu.link_generation, gpu.link_width) == ((1, 4), (16, 16))
    assert gpu.events == {"gpu_idle"}
    assert gpu.fabric is None


def test_a_healthy_gpu_is_one_line():
    ((state, saw),) = told(gpus.judge(parse_smi(recorded(RTX)).gpus))
    assert state == "ok", saw
    assert saw.startswith("1 x NVIDIA GeForce RTX 3080")


def test_ecc_that_is_off_is_told_where_there_is_one():
    ((state, saw),) = told(gpus.judge(parse_smi(recorded(ADA)).gpus))
    assert (state, saw) == ("warning", "GPU 0: ECC is off, so that a flipped bit goes unseen")


def test_slices_of_mig_are_told():
    ((state, saw),) = told(gpus.judge(parse_smi(recorded(A100)).gpus))
    assert (state, saw) == ("warning", "GPU 0 is cut up by MIG: NCCL does not join its slices")


@pytest.mark.parametrize(
    ("change", "state", "saw"),
    [
        (
            ("<dram_uncorrectable>0<", "<dram_uncorrectable>4<"),
            "problem",
            "could not correct: dram_uncorrectable 4",
        ),
        (("<current_ecc>Enabled<", "<current_ecc>Disabled<"), "warning", "ECC is off"),
        (("<pending_ecc>Enabled<", "<pending_ecc>Disabled<"), "warning", "ECC will be Disabled"),
        (
            ("slowdown>Not Active", "slowdown>Active"),
            "problem",
            "hardware slowdown, which halves clocks",
        ),
        (
            ("power_brake_slowdown>Not Active", "power_brake_slowdown>Active"),
            "problem",
            "power brake",
        ),
        (
            ("sw_thermal_slowdown>Not Active", "sw_thermal_slowdown>Active"),
            "warning",
            "for heat",
        ),
        (("<current_link_width>16x", "<current_link_width>8x"), "warning", "8 PCIe lanes of 16"),
        (("<current_link_gen>4", "<current_link_gen>1"), "warning", "PCIe generation 1 of 4"),
        (("<reset_required>No", "<reset_required>Yes"), "problem", "asks for recovery: Reset"),
        (("<compute_mode>Default", "<compute_mode>Prohibited"), "problem", "Prohibited"),
        (
            ("<pending_retirement>N/A", "<pending_retirement>Yes"),
            "problem",
            "waits to be remapped",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_each_fault_of_an_a100_is_told(change, state, saw):
    whole = ("<current_mig>Enabled", "<current_mig>Disabled")
    ((found, words),) = told(gpus.judge(parse_smi(broken(A100, whole, change)).gpus))
    assert found == state
    assert words.startswith("GPU 0")
    assert saw in words


@pytest.mark.parametrize(
    ("change", "saw"),
    [
        (("<remapped_row_pending>No", "<remapped_row_pending>Yes"), "waits to be remapped"),
        (("<remapped_row_failure>No", "<remapped_row_failure>Yes"), "spare rows are used up"),
        (
            ("<gpu_recovery_action>None", "<gpu_recovery_action>Drain and Reset"),
            "asks for recovery: Drain and Reset",
        ),
    ],
)
def test_each_fault_that_newer_drivers_tell_is_told(change, saw):
    on = ("<current_ecc>Disabled", "<current_ecc>Enabled")
    on_later = ("<pending_ecc>Disabled", "<pending_ecc>Enabled")
    ((state, words),) = told(gpus.judge(parse_smi(broken(ADA, on, on_later, change)).gpus))
    assert state == "problem"
    assert saw in words


def test_unlike_gpus_are_told():
    both = [*parse_smi(recorded(ADA)).gpus, *parse_smi(recorded(A100)).gpus]
    assert any("unlike GPUs" in saw for _, saw in told(gpus.judge(both)))


def test_nvswitch_is_not_everywhere():
    with pytest.raises(NotHereError, match="NVSwitch"):
        gpus.judge_fabric(parse_smi(recorded(A100)).gpus)


@pytest.mark.parametrize(
    ("state", "status", "found"),
    [
        ("Completed", "Success", "ok"),
        ("In Progress", "N/A", "problem"),
        ("Not Started", "N/A", "problem"),
        ("Completed", "Insufficient Resources", "problem"),
    ],
)
def test_nvswitch_must_have_registered_each_gpu(state, status, found):
    fabric = "<fabric>\n            <state>{}</state>\n            <status>{}</status>"
    text = broken(A100, (fabric.format("N/A", "N/A"), fabric.format(state, status)))
    ((told_state, saw),) = told(gpus.judge_fabric(parse_smi(text).gpus))
    assert told_state == found
    assert found == "ok" or state in saw
