"""What stops `penstock up` before anything starts."""

import socket
import tempfile
from pathlib import Path

import psutil
import pytest

from pipelines.core.errors import UserError
from pipelines.core.machine import free_port, memory_bytes
from pipelines.core.settings import load_settings
from pipelines.platform import preflight


def test_a_port_in_use_names_the_port_and_its_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    for variable in load_settings().ports:
        monkeypatch.setenv(variable, str(free_port()))
    preflight.check_ports(load_settings())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("PENSTOCK_RAY_PORT", str(port))
        with pytest.raises(UserError, match=f"port {port} .* PENSTOCK_RAY_PORT") as error:
            preflight.check_ports(load_settings())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["eighty", "0", "65536", "-1"])
def test_a_port_that_is_none_names_its_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PENSTOCK_RAY_PORT", text)
    with pytest.raises(UserError, match="PENSTOCK_RAY_PORT"):
        load_settings()


def test_only_up_needs_the_variables_of_the_ports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    (tmp_path / "ports.json").write_text('{"PENSTOCK_MLFLOW_PORT": 15001}')
    monkeypatch.delenv("PENSTOCK_MLFLOW_PORT", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert load_settings().mlflow_url == "http://127.0.0.1:15001"


@pytest.mark.parametrize("name", ["with space", "long" * 10])
def test_a_temporary_folder_that_ray_cannot_use_is_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", f"/{name}")
    with pytest.raises(UserError, match="TMPDIR"):
        preflight.make_runtime_folder()


def test_scarce_memory_and_disk_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight, "MEMORY_GIB", 10**6)
    monkeypatch.setattr(preflight, "DISK_GIB", 10**6)
    memory, disk = preflight.resource_warnings(tmp_path)
    assert "of memory is free" in memory
    assert str(tmp_path) in disk


@pytest.mark.parametrize(
    ("limit", "total", "free"),
    [(str(4 << 30), 4 << 30, 3 << 30), ("max", None, None), (None, None, None)],
)
def test_a_containers_share_of_the_memory_counts(
    tmp_path: Path, limit: str | None, total: int | None, free: int | None
) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{2 << 30}\n")
        (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {1 << 30}\n")
    machine = psutil.virtual_memory()
    in_all, left = memory_bytes(tmp_path)
    assert in_all == (total or machine.total)
    assert left == free if free else left == pytest.approx(machine.available, rel=0.3)
