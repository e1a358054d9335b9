"""The groups of a mesh."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh, group_timeout
from pipelines.parallel.process_group import process_group

CPU = torch.device("cpu")


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(CPU).options._timeout


@pytest.fixture
def group():
    with process_group(7200.0, even_alone=True):
        yield
        # Meshes and their groups outlive a process group in PyTorch's caches.


def test_every_group_waits_for_longer_than_the_watchdog(group):
    mesh = build_mesh(Layout(), CPU, 7200.0)
    groups = [dist.group.WORLD, *mesh.connected.get_all_groups()]
    assert [timeout_of(each) for each in groups] == [timedelta(hours=4)] * len(groups)


def test_no_group_waits_for_less_than_torch_lets_gloo_wait():
    assert group_timeout(600.0) == timedelta(minutes=30)
