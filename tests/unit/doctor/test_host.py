"""Limits of a process, by their numbers."""

import resource

import pytest

from pipelines.doctor import host
from tests.unit.doctor.recordings import told

GIB = 1 << 30


@pytest.mark.parametrize(
    ("soft", "hard", "state"),
    [
        (1024, 4096, "warning"),
        (1024, 1024, "problem"),
        (1024, 1 << 20, "ok"),
        (1024, host.UNLIMITED, "ok"),
    ],
)
def test_open_files(soft, hard, state):
    assert told(host.assess_open_files(soft, hard))[0][0] == state


@pytest.mark.parametrize(
    ("limit", "ipc_lock", "devices", "state"),
    [
        (8 << 20, False, [], "ok"),
        (8 << 20, False, ["mlx5_0"], "problem"),
        (8 << 20, True, ["mlx5_0"], "ok"),
        (host.UNLIMITED, False, ["mlx5_0"], "ok"),
    ],
)
def test_pinned_memory_matters_where_a_device_registers_it(limit, ipc_lock, devices, state):
    assert told(host.assess_pinned_memory(limit, ipc_lock, devices))[0][0] == state


@pytest.mark.parametrize(("mask", "may"), [("00000000a80425fb", False), ("000001ffffffffff", True)])
def test_the_right_to_lock_memory_is_read(mask, may):
    """The first mask is Docker's default, the second root's."""
    assert host.may_lock(f"Name:\tpython\nCapEff:\t{mask}\nSeccomp:\t2\n") is may


@pytest.mark.parametrize(
    ("size", "memory", "state"),
    [(64 << 20, 16 * GIB, "problem"), (2 * GIB, 64 * GIB, "warning"), (8 * GIB, 16 * GIB, "ok")],
)
def test_shared_memory(size, memory, state):
    assert told(host.assess_shared_memory(size, memory))[0][0] == state


def test_this_machine_can_be_read():
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert f"{soft:,} open files" in told(host.files())[0][1]
    for check in (host.pinned_memory, host.shared_memory, host.memory):
        assert told(check())
