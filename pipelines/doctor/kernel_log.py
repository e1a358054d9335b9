"""What the kernel's log tells of GPUs: Xid messages of NVIDIA's driver."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipelines.doctor.findings import NotHereError, Seen, ToolFailedError, ok, warning
from pipelines.doctor.nvidia_smi import bound_gpus
from pipelines.doctor.tools import nvidia_devices, output_of

# As drivers of all ages write it: `NVRM: Xid (PCI:0000:9b:00): 119, pid=2024380, …`.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): ([0-9]{1,4}),? ?(.*)")
_LOST = re.compile(r"NVRM: .*\bfallen off the bus\b")
# What a program's own fault may cause (NVIDIA, Xid catalog: restart the application, or ignore).
_OF_PROGRAMS = {13, 31, 43, 45}
_SHOWN = 80


@dataclass(frozen=True)
class Xid:
    """A code of NVIDIA's catalog, from the GPU at a PCI address."""

    address: str
    code: int


def kernel_log() -> Iterator[Seen]:
    """Look for the driver's errors in the kernel's log, which containers can seldom read."""
    if not nvidia_devices() and not bound_gpus():
        raise NotHereError("no NVIDIA GPU")
    try:
        text = output_of("dmesg", folders=("/usr/bin", "/bin"))
    except ToolFailedError as error:
        raise NotHereError(f"not ours to read; as root: dmesg | grep -i xid ({error})") from None
    yield from assess_kernel_log(parse_xids(text))


def parse_xids(text: str) -> dict[Xid, list[str]]:
    """Return the words of each message, oldest first; a GPU that fell off the bus has one without
    code.
    """
    found: dict[Xid, list[str]] = {}
    for line in text.splitlines():
        if xid := _XID.search(line):
            found.setdefault(Xid(xid[1].lower(), int(xid[2])), []).append(xid[3])
        elif _LOST.search(line):
            found.setdefault(Xid("a GPU", 79), []).append("has fallen off the bus")
    return found


def assess_kernel_log(found: Mapping[Xid, list[str]]) -> Iterator[Seen]:
    """Old ones may be fixed since, so that they only warn: the check of GPUs knows their state."""
    sick = {xid: words for xid, words in found.items() if xid.code not in _OF_PROGRAMS}
    for xid, words in sick.items():
        yield warning(
            f"Xid {xid.code} of {xid.address}, {len(words)} times in the log, at last: "
            f"{words[-1][:_SHOWN]}",
            f"docs.nvidia.com/deploy/xid-errors tells what {xid.code} asks for; drain the machine "
            "and reset or replace the GPU where it comes back",
        )
    if not sick:
        of_programs = Counter(xid.code for xid, words in found.items() for _ in words)
        counted = ", ".join(f"{count} x Xid {code}" for code, count in of_programs.items())
        yield ok(f"no Xid of a sick GPU in the log{'; of programs: ' * bool(counted)}{counted}")
