"""Every parser, on what no tool should print: it reads it, or says that it can't."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.doctor import (
    clock,
    cluster,
    container_toolkit,
    disk,
    gpudirect,
    gpus,
    host,
    kernel_log,
    network,
    numa,
    nvidia_smi,
    topology,
)
from pipelines.doctor.findings import FaultError, NotHereError, Seen
from pipelines.doctor.tools import read
from tests.unit.doctor.recordings import FOLDER

MOUNTINFO = "27 1 254:0 / / rw,relatime shared:1 - nfs4 nas:/runs rw,rsize=1048576,hard\n"
_CLOCKS = re.compile(r"<supported_clocks>.*?</supported_clocks>", re.DOTALL)  # most of the XML
# What tools print in place of a value.
WORDS = ("", "N/A", "[N/A]", "[Not Supported]", "ERR!", "Unknown Error", "GPU is lost", "-1", "٣")


@dataclass(frozen=True)
class Case:
    """A parser, whoever judges by it, and the recordings that it reads."""

    parse: Callable
    judge: Callable[..., Seen | Iterable[Seen]]
    files: str = ""  # recordings, as a pattern
    text: str = ""  # one more


CASES = {
    "nvidia-smi": Case(nvidia_smi.parse_smi, lambda found: _judge_smi(found), "smi_*.xml"),
    "topo": Case(topology.parse_topology, topology.assess_topology, "topo_*.txt"),
    "nvlink": Case(topology.parse_nvlink, topology.assess_nvlink, "nvlink_*.txt"),
    "ibstat": Case(network.parse_ibstat, network.assess_network, "ibstat_*.txt"),
    "gdscheck": Case(gpudirect.parse_gdscheck, lambda found: _judge_gds(found), "gdscheck_*.txt"),
    "modules": Case(
        gpudirect.parse_modules,
        lambda found: gpudirect.assess_rdma(found, "", "6.8.0"),
        text="nvidia_fs 16384 0 - Live 0x0\n",
    ),
    "chronyc": Case(clock.parse_chrony, clock.assess_chrony, "chronyc_*.txt"),
    "timedatectl": Case(lambda text: text, clock.assess_timedatectl, text="NTPSynchronized=yes\n"),
    "toolkit": Case(
        container_toolkit.parse_toolkit,
        lambda found: container_toolkit.assess_container_toolkit(found, "525.105.17"),
        "container_cli_*.txt",
    ),
    "cdi": Case(
        container_toolkit.parse_cdi, container_toolkit.assess_cdi, text="nvidia.com/gpu=0\n"
    ),
    "dmesg": Case(kernel_log.parse_xids, kernel_log.assess_kernel_log, "dmesg_*.txt"),
    "mountinfo": Case(
        lambda text: host.mount_of(Path("/data"), text), disk.assess_mount, text=MOUNTINFO
    ),
    "cores": Case(
        numa.parse_cores,
        lambda found: numa.assess_numa([numa.Node(0, found, 1)], {0}),
        text="0-3,8\n",
    ),
    "status": Case(
        host.may_lock,
        lambda found: host.assess_pinned_memory(1 << 23, found, []),
        text="CapEff:\t00000000a80425fb\n",
    ),
    "report": Case(cluster.parse_report, lambda found: (), text=f"{cluster.REPORT}{{}}\n"),
}


def _judge_smi(found: nvidia_smi.Smi) -> Iterable[Seen]:
    if found.gpus:  # without any, the one who asks says so
        yield from gpus.assess_gpus(found, ["0000:01:00.0"])
        yield gpus.assess_fabric(found.gpus, switches=False)


def _judge_gds(modes: dict[str, str]) -> Iterable[Seen]:
    mount = host.Mount("/data", "xfs", "/dev/md0", {})
    return gpudirect.assess_storage(gpudirect.Storage(True, [], None, True, mount, modes, "no"))


def recordings(case: Case) -> list[str]:
    found = [path.read_text() for path in sorted(FOLDER.glob(case.files))] if case.files else []
    short = [_CLOCKS.sub("", text) for text in found]
    return [*short, *([case.text] if case.text else [])]


@st.composite
def spoilt(draw: st.DrawFn, texts: list[str]) -> str:
    """A recording with pieces cut out or put in another's place."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from([0, 1, 5, 20, 400, 1 << 20])))
        text = (
            text[:start] + draw(st.one_of(st.sampled_from(WORDS), st.text(max_size=8))) + text[end:]
        )
    return text


@pytest.mark.parametrize("name", CASES)
def test_recordings_hold_something_to_read(name):
    assert recordings(CASES[name])


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60)
@given(data=st.data())
def test_nothing_that_is_printed_breaks_a_check(name, data):
    case = CASES[name]
    text = data.draw(st.one_of(spoilt(recordings(case)), st.text()))
    try:
        seen = case.judge(read(case.parse, text, name))
        assert all(isinstance(each, Seen) for each in ([seen] if isinstance(seen, Seen) else seen))
    except (FaultError, NotHereError) as told:
        assert str(told)
