import os
import socket
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from pipelines.core.errors import SharedError, UnreachableError, UserError
from pipelines.parallel import process_group as process_groups
from pipelines.parallel.process_group import (
    _choose_interface,
    interface_of,
    one_for_all,
    process_group,
)


@pytest.mark.parametrize(
    ("mine", "told"), [(UserError, SharedError), (UnreachableError, UnreachableError)]
)
def test_an_error_of_one_is_one_of_all(mine: type[UserError], told: type[UserError]) -> None:
    with pytest.raises(UserError, match=r"^a line$") as raised, one_for_all():
        raise mine("a line")
    assert raised.type is told


@pytest.fixture
def second_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A process with the second of two GPUs, which are only named; the allocator's settings."""
    settings: list[str] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_GLOO_LAZY_INIT"):
        monkeypatch.delenv(variable, raising=False)
    return settings


def test_a_group_is_told_its_device_and_connects_lazily(
    second_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, torch.device, str | None]] = []

    def init(backend: str, device_id: torch.device) -> None:
        told.append((backend, device_id, os.environ.get("TORCH_GLOO_LAZY_INIT")))

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with process_group() as device:
        assert device == torch.device("cuda", 1)
    assert told == [("nccl", torch.device("cuda", 1), "1")]


def test_a_gpus_memory_grows_in_place_unless_the_user_has_settings(
    second_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with process_group():
        pass
    assert second_gpu == ["expandable_segments:True,pinned_max_round_threshold_mb:1"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    with process_group():
        pass
    assert len(second_gpu) == 1


def chosen_for(
    address: str, monkeypatch: pytest.MonkeyPatch, told: str | None = None
) -> str | None:
    # Set first, so that it is set back after the test.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", told or "")
    if told is None:
        del os.environ["GLOO_SOCKET_IFNAME"]
    monkeypatch.setenv("MASTER_ADDR", address)
    _choose_interface()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = ""
    return chosen


def test_gloo_listens_where_the_first_process_is_reached_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {
        each.address: name
        for name, has in psutil.net_if_addrs().items()
        for each in has
        if each.family == socket.AF_INET and name != "lo"
    }
    if not own:
        pytest.skip("this machine has the loopback only")
    address, name = next(iter(own.items()))
    assert chosen_for(address, monkeypatch) == name
    assert chosen_for(address, monkeypatch, told="mine") == "mine"


@pytest.mark.parametrize("address", ["127.0.0.1", "no such host", "a..b"])
def test_where_its_name_leads_to_the_loopback_it_is_the_default_route(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    default = next((name for name, destination, *_ in routes if destination == "00000000"), None)
    assert chosen_for(address, monkeypatch) == default


@pytest.mark.parametrize(("here", "times"), [("1", 1), ("2", 0), (None, 1)])
def test_it_is_chosen_for_several_hosts_only(
    here: str | None, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(process_groups, "_choose_interface", lambda: calls.append(None))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)  # nobody is to meet
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if here:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    with process_group():
        assert len(calls) == times


def test_the_loopback_and_an_address_of_nobody() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None  # TEST-NET-3, which nobody has
