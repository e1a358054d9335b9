"""Each GPU's health: memory errors, throttling, its PCIe link, and what hides it."""

from collections.abc import Iterator, Sequence

from pipelines.doctor.findings import NotHereError, Seen, ok, problem, warning
from pipelines.doctor.smi import Gpu, smi

_HARDWARE = {
    "hw_slowdown": "hardware slowdown, which halves clocks or more",
    "hw_thermal_slowdown": "hardware slowdown by heat",
    "hw_power_brake_slowdown": "power brake by the power supply",
}
_SLOW = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; look at cooling, power supply and cables"


def health() -> Iterator[Seen]:
    """Every GPU's own state."""
    yield from judge(smi().gpus)


def judge(gpus: Sequence[Gpu]) -> list[Seen]:
    """A line for each fault; one line where there is none."""
    faults = [fault for gpu in gpus for fault in _faults(gpu)]
    if len(names := sorted({gpu.name for gpu in gpus})) > 1:
        mend = "give a job GPUs of one kind: by node label, or CUDA_VISIBLE_DEVICES"
        faults.append(warning(f"unlike GPUs: {', '.join(names)}; the slowest sets the pace", mend))
    return faults or [ok(f"{len(gpus)} x {gpus[0].name}: no errors, no throttling")]


def fabric() -> Iterator[Seen]:
    """NVSwitch, which a service of its own sets up."""
    yield judge_fabric(smi().gpus)


def judge_fabric(gpus: Sequence[Gpu]) -> Seen:
    """GPUs on NVSwitch register with the fabric manager before CUDA can start."""
    states = {gpu.number: gpu.fabric for gpu in gpus if gpu.fabric}
    if not states:
        raise NotHereError("no GPU here is on NVSwitch")
    bad = {number: each for number, each in states.items() if each != ("Completed", "Success")}
    if not bad:
        return ok(f"{len(states)} GPUs have registered with NVSwitch's fabric manager")
    number, (state, status) = next(iter(bad.items()))
    return problem(
        f"GPU {number}: fabric {state}, {status or 'no status'}; CUDA fails with error 802 there",
        "systemctl restart nvidia-fabricmanager, of the driver's very version, and read its log",
    )


def _faults(gpu: Gpu) -> Iterator[Seen]:
    yield from _memory_faults(gpu)
    yield from _clock_faults(gpu)
    who = f"GPU {gpu.number}"
    if gpu.recovery not in (None, "None"):
        mend = f"end what runs on it, then nvidia-smi -r -i {gpu.number}, or reboot"
        yield problem(f"{who} asks for recovery: {gpu.recovery}", mend)
    if gpu.compute_mode == "Prohibited":
        yield problem(f"{who} is in compute mode Prohibited", f"nvidia-smi -i {gpu.number} -c 0")
    if gpu.mig == "Enabled":
        mend = f"nvidia-smi -i {gpu.number} -mig 0, unless slices are meant"
        yield warning(f"{who} is cut up by MIG: NCCL does not join its slices", mend)


def _memory_faults(gpu: Gpu) -> Iterator[Seen]:
    who, number = f"GPU {gpu.number}", gpu.number
    if gpu.rows_failed:
        saw = f"{who}: a memory row could not be remapped; its spare rows are used up"
        yield problem(saw, "take it out of service and have it replaced (NVIDIA's RMA criterion)")
    elif gpu.rows_pending:
        saw = f"{who}: bad memory waits to be remapped"
        yield problem(saw, f"nvidia-smi -r -i {number} with nothing running on it, or reboot")
    if errors := {name: count for name, count in gpu.uncorrectable.items() if count}:
        counted = ", ".join(f"{name} {count}" for name, count in errors.items())
        mend = f"dmesg | grep -i xid; nvidia-smi -r -i {number}; replace it if they come back"
        yield problem(f"{who}: memory errors that ECC could not correct: {counted}", mend)
    if gpu.ecc and gpu.ecc[0] == "Disabled":
        mend = f"nvidia-smi -i {number} -e 1, then reboot"
        yield warning(f"{who}: ECC is off, so that a flipped bit goes unseen", mend)
    elif gpu.ecc and gpu.ecc[0] != gpu.ecc[1]:
        yield warning(f"{who}: ECC will be {gpu.ecc[1]} after a reboot", "reboot, or set it back")


def _clock_faults(gpu: Gpu) -> Iterator[Seen]:
    who = f"GPU {gpu.number}"
    if hard := [words for event, words in _HARDWARE.items() if event in gpu.events]:
        yield problem(f"{who}: {'; '.join(hard)}", _SLOW)
    if "sw_thermal_slowdown" in gpu.events:
        yield warning(f"{who}: the driver lowers its clocks for heat", _SLOW)
    if gpu.link_width and gpu.link_width[0] < gpu.link_width[1]:
        now, most = gpu.link_width
        mend = "reseat card and riser, look for PCIe errors in dmesg; a slot may have fewer lanes"
        yield warning(f"{who}: {now} PCIe lanes of {most}", mend)
    idle = "gpu_idle" in gpu.events  # an idle link saves power by a lower generation
    if gpu.link_generation and gpu.link_generation[0] < gpu.link_generation[1] and not idle:
        now, most = gpu.link_generation
        mend = "see the BIOS's setting of the slot, and PCIe errors in dmesg"
        yield warning(f"{who}: PCIe generation {now} of {most} while it works", mend)
