import pytest

from pipelines.core.errors import UserError
from pipelines.planning.hardware import Hardware
from pipelines.planning.hardware_table import ENTRIES, named, of_driver

GIB = 2**30


@pytest.mark.parametrize("hardware", ENTRIES.values(), ids=ENTRIES)
def test_an_entry_says_what_planning_asks(hardware: Hardware) -> None:
    assert 8 * GIB < hardware.memory_bytes < 512 * GIB
    links = (hardware.memory_bandwidth, hardware.link_bandwidth, hardware.network_bandwidth)
    assert list(links) == sorted(links, reverse=True)
    assert links[-1] > 0
    assert hardware.peak("bf16") >= hardware.peak("fp32") > 0
    assert hardware.watts > 0
    assert hardware.devices_per_node > 0
    assert hardware.mfu is None or 0.2 < hardware.mfu < 0.7
    assert hardware.hourly_price is None or 0.1 < hardware.hourly_price < 15


def test_a_device_is_found_by_its_driver_s_name_and_by_the_command_s() -> None:
    assert of_driver("NVIDIA H200") is named("h200")
    assert (
        sum(each.driver_name is None for each in ENTRIES.values()) == 4
    )  # TPUs, a Gaudi and a CPU have no such driver


@pytest.mark.parametrize(
    ("name", "gib", "link"),
    [("h100", 79.6, 450e9), ("a100-80", 80, 300e9), ("l4", 22.5, 31.5e9), ("mi300x", 192, 448e9)],
)
def test_memory_is_what_the_driver_reports_and_links_are_one_way(name, gib, link) -> None:
    assert named(name).memory_bytes / GIB == pytest.approx(gib, abs=0.05)
    assert named(name).link_bandwidth == link


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"no accelerator 'h10': did you mean h100\? the known "):
        named("h10")
