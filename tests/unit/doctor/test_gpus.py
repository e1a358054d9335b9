"""GPUs, from nvidia-smi's XML: healthy as recorded, and with one fault at a time."""

import shlex
from dataclasses import replace

import pytest

from pipelines.doctor import gpus
from pipelines.doctor.findings import FaultError, NotHereError
from pipelines.doctor.nvidia_smi import ask_driver, parse_smi
from tests.unit.doctor.recordings import FOLDER, recorded, told

RTX, ADA, A100, T4 = "smi_rtx3080.xml", "smi_rtx4000_ada.xml", "smi_a100_sxm4.xml", "smi_t4.xml"


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
    ((state, saw),) = told(gpus.assess_gpus(parse_smi(recorded(RTX)), ()))
    assert state == "ok", saw
    assert saw.startswith("1 x NVIDIA GeForce RTX 3080")


def test_older_drivers_call_things_otherwise():
    """Schema 11, of driver 515: a T4 in a cloud's slot of eight lanes."""
    machine = parse_smi(recorded(T4))
    (gpu,) = machine.gpus
    assert (machine.driver, gpu.power_limit, gpu.performance) == ("515.105.01", (70.0, 70.0), "P0")
    assert told(gpus.assess_gpus(machine, ())) == [("warning", "GPU 0: 8 PCIe lanes of 16")]
    hot = parse_smi(
        broken(
            T4,
            (
                "<clocks_throttle_reason_hw_thermal_slowdown>Not Active",
                "<clocks_throttle_reason_hw_thermal_slowdown>Active",
            ),
        )
    )
    assert hot.gpus[0].events == {"hw_thermal_slowdown"}


def test_a_blackwell_at_rest_has_a_slow_link_and_no_event():
    """As driver 590 has it: P8, generation 1 of 4, gpu_idle Not Active (telegraf's testdata)."""
    rest = ("gpu_idle>Active<", "gpu_idle>Not Active<")
    on = ("<current_ecc>Disabled", "<current_ecc>Enabled")
    on_later = ("<pending_ecc>Disabled", "<pending_ecc>Enabled")
    machine = parse_smi(broken(ADA, rest, on, on_later))
    assert (machine.gpus[0].link_generation, machine.gpus[0].events) == ((1, 4), frozenset())
    assert [state for state, _ in told(gpus.assess_gpus(machine, ()))] == ["ok"]


def test_double_bit_errors_of_older_gpus_are_counted():
    """As drivers before Turing's count them."""
    counted = "<volatile><double_bit><device_memory>2</device_memory><total>2</total></double_bit>"
    machine = parse_smi(broken(T4, ("<volatile>", counted)))
    assert machine.gpus[0].uncorrectable["double_bit"] == 2


def test_ecc_that_is_off_is_told_where_there_is_one():
    ((state, saw),) = told(gpus.assess_gpus(parse_smi(recorded(ADA)), ()))
    assert (state, saw) == ("warning", "GPU 0: ECC is off, so that a flipped bit goes unseen")


def test_slices_of_mig_are_told():
    ((state, saw),) = told(gpus.assess_gpus(parse_smi(recorded(A100)), ()))
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
        (
            ("<current_power_limit>500.00 W", "<current_power_limit>300.00 W"),
            "warning",
            "its power is capped at 300 W, by default 500",
        ),
        (
            ("<power_draw>67.03 W", "<power_draw>ERR!"),
            "warning",
            "the driver can't read power_draw",
        ),
        (
            ("<drain_and_reset_recommended>No", "<drain_and_reset_recommended>Yes"),
            "problem",
            "asks for recovery: Drain and Reset",
        ),
        (("<gpu_util>N/A", "<gpu_util>GPU is lost"), "problem", "(0000:01:00.0) is lost"),
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
    ((found, words),) = told(gpus.assess_gpus(parse_smi(broken(A100, whole, change)), ()))
    assert found == state
    assert words.startswith("GPU 0")
    assert saw in words


@pytest.mark.parametrize(
    ("change", "saw"),
    [
        (("<remapped_row_pending>No", "<remapped_row_pending>Yes"), "waits to be remapped"),
        (("<remapped_row_failure>No", "<remapped_row_failure>Yes"), "can't be fixed any more"),
        (
            ("<sram_threshold_exceeded>N/A", "<sram_threshold_exceeded>Yes"),
            "can't be fixed any more",
        ),
        (("<channel_repair_pending>No", "<channel_repair_pending>Yes"), "waits to be remapped"),
        (
            ("<gpu_recovery_action>None", "<gpu_recovery_action>Drain and Reset"),
            "asks for recovery: Drain and Reset",
        ),
    ],
)
def test_each_fault_that_newer_drivers_tell_is_told(change, saw):
    on = ("<current_ecc>Disabled", "<current_ecc>Enabled")
    on_later = ("<pending_ecc>Disabled", "<pending_ecc>Enabled")
    ((state, words),) = told(gpus.assess_gpus(parse_smi(broken(ADA, on, on_later, change)), ()))
    assert state == "problem"
    assert saw in words


def test_unlike_gpus_are_told():
    one, other = parse_smi(recorded(ADA)), parse_smi(recorded(A100))
    both = replace(one, gpus=(*one.gpus, *other.gpus))
    assert any("unlike GPUs" in saw for _, saw in told(gpus.assess_gpus(both, ())))


def test_several_gpus_want_their_driver_kept_loaded():
    one = parse_smi(broken(A100, ("<current_mig>Enabled", "<current_mig>Disabled")))
    (gpu,) = one.gpus
    four = replace(one, gpus=tuple(replace(gpu, number=number) for number in range(4)))
    assert [saw for _, saw in told(gpus.assess_gpus(four, ()))] == [
        "persistence mode is off on GPU 0, 1, 2, 3: each job waits for the driver"
    ]


def test_a_gpu_that_the_kernel_holds_and_nvidia_smi_lacks_is_told():
    machine = parse_smi(recorded(RTX))
    bound = ["0000:0c:00.0", "0000:4e:00.0"]
    assert told(gpus.assess_gpus(machine, bound)) == [
        ("problem", "the kernel holds 2 GPUs, nvidia-smi lists no 0000:4e:00.0")
    ]
    assert [state for state, _ in told(gpus.assess_gpus(machine, bound[:1]))] == ["ok"]


def test_a_job_that_was_given_some_gpus_lacks_none(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat {shlex.quote(str(FOLDER / RTX))}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpus, "smi", ask_driver.__wrapped__)
    monkeypatch.setattr(gpus, "bound_gpus", lambda: ["0000:0c:00.0", "0000:4e:00.0"])
    monkeypatch.setattr(gpus, "in_container", lambda: False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert [state for state, _ in told(gpus.health())] == ["problem"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert [state for state, _ in told(gpus.health())] == ["ok"]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("WARNING: infoROM is corrupted at gpu 0000:0B:00.0", "nvidia-smi -r"),
        (
            "Unable to determine the device handle for GPU0000:4E:00.0: Unknown Error",
            "power-cycle",
        ),
    ],
)
def test_what_nvidia_smi_says_beside_its_xml_is_told(words, fix):
    (seen,) = gpus.assess_gpus(parse_smi(f"{recorded(RTX)}\n{words}\n"), ())
    assert (str(seen.state), seen.saw) == ("problem", f"nvidia-smi warns: {words}")
    assert fix in seen.fix


def test_nvidia_smi_that_ends_with_a_warning_is_read_all_the_same(tmp_path, monkeypatch):
    """With 14 for a broken infoROM (nvidia-smi(1), RETURN VALUE), and all of its XML."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f"#!/bin/sh\ncat {shlex.quote(str(FOLDER / RTX))}\necho 'WARNING: infoROM'\nexit 14\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    machine = ask_driver.__wrapped__()
    assert machine.words == "WARNING: infoROM"
    assert len(machine.gpus) == 1


@pytest.mark.parametrize(
    ("script", "saw", "fix"),
    [
        (
            "echo 'Unable to determine the device handle for GPU0000:07:00.0: Unknown Error'\n"
            "exit 255",
            "device handle",
            "power-cycle",
        ),
        ("echo 'No devices were found'\nexit 6", "No devices were found", "grep NVRM"),
        ("echo '<nvidia_smi_log></nvidia_smi_log>'", "No devices were found", "grep NVRM"),
        ("echo '<nvidia_smi_log><gpu></nvidia_smi_log>'", "could not be read: bad XML", "report"),
        ("true", "could not be read: no nvidia_smi_log in it; it says: nothing", "report"),
    ],
)
def test_nvidia_smi_that_fails_says_why_with_the_fix(tmp_path, monkeypatch, script, saw, fix):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(FaultError, match=saw) as error:
        ask_driver.__wrapped__()
    assert fix in error.value.fix


def test_nvswitch_is_not_everywhere():
    with pytest.raises(NotHereError, match="NVSwitch"):
        gpus.assess_fabric(parse_smi(recorded(A100)).gpus, switches=False)
    with pytest.raises(NotHereError, match="older than Hopper"):
        gpus.assess_fabric(parse_smi(recorded(A100)).gpus, switches=True)


@pytest.mark.parametrize(
    ("health", "found"), [("Healthy", "ok"), ("N/A", "ok"), ("Unhealthy", "problem")]
)
def test_nvswitchs_links_must_be_healthy(health, found):
    fabric = ("<fabric>", "<fabric><state>Completed</state><status>Success</status>")
    text = broken(ADA, fabric, ("<summary>N/A", f"<summary>{health}"))
    assert told(gpus.assess_fabric(parse_smi(text).gpus, switches=False))[0][0] == found


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
    ((told_state, saw),) = told(gpus.assess_fabric(parse_smi(text).gpus, switches=True))
    assert told_state == found
    assert found == "ok" or state in saw
