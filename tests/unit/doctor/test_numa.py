"""NUMA nodes, from folders as the kernel lays them out."""

from pathlib import Path

import pytest

from pipelines.doctor.findings import NotHereError
from pipelines.doctor.numa import assess_numa, numa, parse_cores, read_nodes
from tests.unit.doctor.recordings import told

NODES = Path("/sys/devices/system/node")
GIB = 1 << 20  # in kB, as the kernel writes it


@pytest.fixture
def machine(tmp_path):
    def write(*nodes: tuple[str, int]) -> None:
        for number, (cores, kilobytes) in enumerate(nodes):
            folder = tmp_path / f"node{number}"
            folder.mkdir()
            (folder / "cpulist").write_text(f"{cores}\n")
            (folder / "meminfo").write_text(
                f"Node {number} MemTotal:       {kilobytes} kB\nNode {number} MemFree: 1 kB\n"
            )
        return read_nodes(tmp_path)

    return write


def test_cores_are_read_as_the_kernel_writes_them():
    assert parse_cores("0-2,8") == {0, 1, 2, 8}
    assert parse_cores("") == frozenset()


def test_two_whole_sockets(machine):
    nodes = machine(("0-3", 64 * GIB), ("4-7", 63 * GIB))
    assert told(assess_numa(nodes, set(range(8)))) == [
        ("ok", "2 NUMA nodes with cores, all open to this process")
    ]


def test_a_module_that_is_missing_is_told(machine):
    nodes = machine(("0-3", 64 * GIB), ("4-7", 32 * GIB))
    assert told(assess_numa(nodes, set(range(8))))[0] == (
        "warning",
        "NUMA node 1 has 32 GiB of memory, another 64",
    )


def test_a_socket_that_is_closed_to_this_process_is_told(machine):
    nodes = machine(("0-3", 64 * GIB), ("4-7", 64 * GIB))
    ((state, saw),) = told(assess_numa(nodes, {0, 1}))
    assert (state, saw) == ("warning", "this process may use no core of NUMA nodes [1]")


def test_memory_without_cores_is_no_socket(machine):
    """As on Grace Hopper, where a GPU's memory is a node."""
    nodes = machine(("0-3", 64 * GIB), ("", 96 * GIB))
    assert [state for state, _ in told(assess_numa(nodes, set(range(4))))] == ["ok"]


def test_a_kernel_without(tmp_path):
    with pytest.raises(NotHereError):
        read_nodes(tmp_path)


@pytest.mark.skipif(not NODES.is_dir(), reason="no NUMA in this kernel")
def test_this_machine_can_be_read():
    assert told(numa())
