"""Each GPU's health: memory errors, throttling, power, its PCIe link, and what hides it."""

import os
from collections.abc import Iterator, Mapping, Sequence

from pipelines.doctor.findings import NotHereError, Seen, ok, problem, warning
from pipelines.doctor.nvidia_smi import Gpu, Smi, bound_gpus, fix_of, smi
from pipelines.doctor.tools import has_nvswitch, in_container

_HARDWARE = {
    "hw_slowdown": "hardware slowdown, which halves clocks or more",
    "hw_thermal_slowdown": "hardware slowdown by heat",
    "hw_power_brake_slowdown": "power brake by the power supply",
}
_REGISTERED = ("Completed", "Success")
_AT_WORK = ("P0", "P1", "P2")  # below, links rest at a lower generation to save power
_SLOW = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; look at cooling, power supply and cables"


def health() -> Iterator[Seen]:
    """Yield every GPU's own state."""
    # A container or a job of Slurm is given some of the machine's GPUs, and sees all in /proc.
    partly = in_container() or "SLURM_JOB_ID" in os.environ
    yield from assess_gpus(smi(), [] if partly else bound_gpus())


def assess_gpus(machine: Smi, bound: Sequence[str]) -> list[Seen]:
    """Return a line for each fault; one line where there is none.

    Args:
        machine: As nvidia-smi has it.
        bound: Addresses of the GPUs that the kernel's module holds and that should be listed.
    """
    gpus = machine.gpus
    faults = [*_missing(machine, bound), *(fault for gpu in gpus for fault in _faults(gpu))]
    off = [str(gpu.number) for gpu in gpus if gpu.persistence == "Disabled"]
    if off and len(gpus) > 1:  # one is there again in a moment
        fix = "systemctl enable --now nvidia-persistenced on the host, or nvidia-smi -pm 1"
        saw = f"persistence mode is off on GPU {', '.join(off)}: each job waits for the driver"
        faults.append(warning(saw, fix))
    if len(names := sorted({gpu.name for gpu in gpus if gpu.name})) > 1:
        fix = "give a job GPUs of one kind: by node label, or CUDA_VISIBLE_DEVICES"
        faults.append(warning(f"unlike GPUs: {', '.join(names)}; the slowest sets the pace", fix))
    return faults or [ok(f"{len(gpus)} x {gpus[0].name}: no errors, no throttling")]


def _missing(machine: Smi, bound: Sequence[str]) -> Iterator[Seen]:
    """Yield what the driver can't open is left out of its list, or named beside it."""
    listed = {gpu.address for gpu in machine.gpus}
    gone = [address for address in bound if address not in listed]
    if machine.words:
        saw = f"nvidia-smi warns: {machine.words}"
        yield problem(saw, fix_of(machine.words, "dmesg | grep NVRM; drain the machine, reboot"))
    elif gone:
        saw = f"the kernel holds {len(bound)} GPUs, nvidia-smi lists no {', '.join(gone)}"
        yield problem(saw, fix_of("gpu is lost", ""))


def fabric() -> Iterator[Seen]:
    """NVSwitch, which a service of its own sets up."""
    yield assess_fabric(smi().gpus, has_nvswitch())


def assess_fabric(gpus: Sequence[Gpu], switches: bool) -> Seen:
    """Return GPUs on NVSwitch register with the fabric manager before CUDA can start."""
    states = {gpu.number: gpu.fabric for gpu in gpus if gpu.fabric}
    if not states:
        if switches:
            raise NotHereError("GPUs older than Hopper don't tell of NVSwitch: see all-reduce")
        raise NotHereError("no GPU here is on NVSwitch")
    bad = {number: each for number, each in states.items() if each[:2] != _REGISTERED}
    if not bad:
        return _assess_health({number: health for number, (_, _, health) in states.items()})
    number, (state, status, _) = next(iter(bad.items()))
    return problem(
        f"GPU {number}: fabric {state}, {status or 'no status'}; CUDA fails with error 802 there",
        "systemctl restart nvidia-fabricmanager, of the driver's very version, and read its log",
    )


def _assess_health(by_gpu: Mapping[int, str | None]) -> Seen:
    """Newer drivers say how well the links to the switches do."""
    if sick := {number: said for number, said in by_gpu.items() if said not in (None, "Healthy")}:
        number, said = next(iter(sick.items()))
        fix = "nvidia-smi nvlink -e and -s; dmesg | grep -i sxid; reset the GPUs and switches"
        return problem(f"GPU {number}: NVSwitch's links are {said}", fix)
    return ok(f"{len(by_gpu)} GPUs have registered with NVSwitch's fabric manager")


def _faults(gpu: Gpu) -> Iterator[Seen]:
    who = f"GPU {gpu.number}"
    if gpu.lost:
        yield problem(f"{who} ({gpu.address}) is lost", fix_of("gpu is lost", ""))
        return
    if gpu.unread:
        fix = "dmesg | grep -i xid; where more than fans can't be read, reset the GPU or reboot"
        yield warning(f"{who}: the driver can't read {', '.join(gpu.unread[:3])}", fix)
    yield from _memory_faults(gpu)
    yield from _clock_faults(gpu)
    yield from _link_faults(gpu)
    if gpu.recovery not in (None, "None"):
        fix = f"end what runs on it, then nvidia-smi -r -i {gpu.number}, or reboot"
        yield problem(f"{who} asks for recovery: {gpu.recovery}", fix)
    if gpu.compute_mode == "Prohibited":
        yield problem(f"{who} is in compute mode Prohibited", f"nvidia-smi -i {gpu.number} -c 0")
    if gpu.mig == "Enabled":
        fix = f"nvidia-smi -i {gpu.number} -mig 0, unless slices are meant"
        yield warning(f"{who} is cut up by MIG: NCCL does not join its slices", fix)


def _memory_faults(gpu: Gpu) -> Iterator[Seen]:
    who, number = f"GPU {gpu.number}", gpu.number
    if gpu.worn:
        saw = f"{who}: memory can't be fixed any more: no spare rows, or too many SRAM errors"
        yield problem(saw, "take it out of service and have it replaced (NVIDIA's RMA criterion)")
    elif gpu.repair_pending:
        saw = f"{who}: bad memory waits to be remapped"
        yield problem(saw, f"nvidia-smi -r -i {number} with nothing running on it, or reboot")
    if errors := {name: count for name, count in gpu.uncorrectable.items() if count}:
        counted = ", ".join(f"{name} {count}" for name, count in errors.items())
        fix = f"dmesg | grep -i xid; nvidia-smi -r -i {number}; replace it if they come back"
        yield problem(f"{who}: memory errors that ECC could not correct: {counted}", fix)
    if gpu.ecc and gpu.ecc[0] == "Disabled":
        fix = f"nvidia-smi -i {number} -e 1, then reboot"
        yield warning(f"{who}: ECC is off, so that a flipped bit goes unseen", fix)
    elif gpu.ecc and gpu.ecc[0] != gpu.ecc[1]:
        yield warning(f"{who}: ECC will be {gpu.ecc[1]} after a reboot", "reboot, or set it back")


def _clock_faults(gpu: Gpu) -> Iterator[Seen]:
    who = f"GPU {gpu.number}"
    if hard := [words for event, words in _HARDWARE.items() if event in gpu.events]:
        yield problem(f"{who}: {'; '.join(hard)}", _SLOW)
    if "sw_thermal_slowdown" in gpu.events:
        yield warning(f"{who}: the driver lowers its clocks for heat", _SLOW)
    if gpu.power_limit and gpu.power_limit[0] < gpu.power_limit[1]:
        now, usual = gpu.power_limit
        fix = f"nvidia-smi -i {gpu.number} -pl {usual:g}, unless the cap is meant"
        yield warning(f"{who}: its power is capped at {now:g} W, by default {usual:g}", fix)


def _link_faults(gpu: Gpu) -> Iterator[Seen]:
    who = f"GPU {gpu.number}"
    if gpu.link_width and gpu.link_width[0] < gpu.link_width[1]:
        now, most = gpu.link_width
        fix = (
            "reseat card and riser, look for PCIe errors in dmesg; some slots, and many machines "
            "of clouds, have fewer lanes by design"
        )
        yield warning(f"{who}: {now} PCIe lanes of {most}", fix)
    works = gpu.performance in _AT_WORK and "gpu_idle" not in gpu.events
    if works and gpu.link_generation and gpu.link_generation[0] < gpu.link_generation[1]:
        now, most = gpu.link_generation
        fix = "see the BIOS's setting of the slot, and PCIe errors in dmesg"
        yield warning(f"{who}: PCIe generation {now} of {most} while it works", fix)
