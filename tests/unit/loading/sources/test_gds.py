"""Whether GPUDirect Storage is had is told from the driver, cuFile's configuration and a read."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.loading.sources import gpu_readers
from pipelines.loading.sources.gpu_readers import PinnedReader
from pipelines.loading.sources.readers import device_threads

GPU = torch.device("cuda", 0)  # only named: nothing is put there


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """`why_not`, of a machine that is made of files."""
    for variable in gpu_readers._NEVER_THROUGH_THE_HOST:
        monkeypatch.setenv(variable, "")  # put back after the test

    def why_not(
        driver: bool = True,
        properties: dict[str, object] | None = None,
        read: Callable[..., None] = lambda _path, _device: None,
        device: torch.device = GPU,
        **environ: str,
    ) -> str | None:
        folder, config = tmp_path / "nvidia-fs", tmp_path / "cufile.json"
        if driver:
            folder.mkdir()
        text = json.dumps({"properties": properties or {}}, indent=1)
        config.write_text("// NVIDIA's file begins so\n" + text)
        environ.setdefault(gpu_readers._CONFIG_VARIABLE, str(config))
        return gpu_readers.why_not(tmp_path / "weights", device, folder, environ, read)

    return why_not


def test_a_read_that_may_not_fall_back_proves_it(ask: Callable[..., str | None]) -> None:
    names = ("CUFILE_ALLOW_COMPAT_MODE", "KVIKIO_COMPAT_MODE", "KVIKIO_GDS_THRESHOLD")
    told: list[list[str | None]] = []
    assert ask(read=lambda _path, _device: told.append([*map(os.environ.get, names)])) is None
    assert told == [["false", "OFF", "0"]]  # before cuFile and KvikIO were used


def test_the_kernels_own_way_needs_no_driver(ask: Callable[..., str | None]) -> None:
    assert ask(driver=False, properties={"use_pci_p2pdma": True}) is None


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"device": torch.device("cpu")}, "there is no CUDA device"),
        ({"driver": False}, "compatibility mode: the kernel driver nvidia-fs isn't loaded"),
        ({"properties": {"force_compat_mode": True}}, "compatibility mode: it is forced"),
        ({"CUFILE_FORCE_COMPAT_MODE": "true"}, "compatibility mode: it is forced"),
        ({"CUFILE_ALLOW_COMPAT_MODE": "1"}, "a read would prove nothing"),
    ],
)
def test_why_not(ask: Callable[..., str | None], machine: dict[str, object], reason: str) -> None:
    def never(_path: Path, _device: torch.device) -> None:
        raise AssertionError("this machine is not to be asked")

    assert reason in (ask(read=never, **machine) or "")


def test_a_read_that_fails_says_so_in_one_line(ask: Callable[..., str | None]) -> None:
    def fail(_path: Path, _device: torch.device) -> None:
        raise RuntimeError("cuFileHandleRegister failed: not supported\nC++ stack trace")

    reason = ask(read=fail) or ""
    assert "weights directly: cuFileHandleRegister failed" in reason
    assert "\n" not in reason


def test_this_machines_own_library_is_asked(ask: Callable[..., str | None], tmp_path: Path) -> None:
    """Here there is no GPU: the real read fails, and that is the reason."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    (tmp_path / "weights").write_bytes(bytes(4096))
    assert "cuFile can't read" in (ask(read=None) or "")


def test_a_broken_configuration_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cufile.json").write_text("{")
    environ = {gpu_readers._CONFIG_VARIABLE: str(tmp_path / "cufile.json")}
    with pytest.raises(UserError, match=r"cufile\.json: .* not valid JSON"):
        gpu_readers.why_not(tmp_path, GPU, tmp_path, environ)


def test_each_thread_is_on_the_device_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    on = threading.local()
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda index: setattr(on, "index", index)
    )
    pool = device_threads(2, "reader", torch.device("cuda", 5))
    gate = threading.Barrier(2)  # two threads at once

    def index() -> int:
        gate.wait(10)
        return int(on.index)

    assert [each.result() for each in [pool.submit(index), pool.submit(index)]] == [5, 5]
    pool.shutdown()


def test_a_readers_threads_are_on_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    found: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", found.append)
    (tmp_path / "weights").write_bytes(bytes(4096))
    reader = PinnedReader([tmp_path / "weights"], torch.device("cuda", 5))
    enter = reader._pool._initializer
    assert enter is not None
    enter()
    assert found == [5]


def test_a_part_of_a_storage_is_that_part() -> None:
    """What `load_storage` fills: a slice of a storage shares its memory."""
    whole = torch.zeros(100, dtype=torch.uint8)
    out = whole[10:30]
    start = out.storage_offset()
    part = out.untyped_storage()[start : start + len(out)]
    part.fill_(7)
    assert whole.tolist() == [0] * 10 + [7] * 20 + [0] * 70
