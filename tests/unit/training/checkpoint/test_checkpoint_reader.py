"""What is restored through a reader is, to the bit, what PyTorch's own reader restores."""

import threading
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, LoadPlan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from pipelines.loading.sources import readers
from pipelines.loading.sources.gpu_readers import open_reader
from pipelines.training.checkpoint import checksums, dcp_files
from pipelines.training.checkpoint.dcp_files import CheckpointReader

State = dict[str, Any]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def state() -> State:
    torch.manual_seed(0)
    return {
        "weight": torch.randn(37, 19),
        "bf16": torch.randn(8, 5, 3).to(torch.bfloat16),
        "transposed": torch.randn(6, 9).t(),
        "part": torch.arange(100)[10:20],
        "step": torch.tensor(7.0),
        "empty": torch.empty(0, 4),
        "bools": torch.rand(33) > 0.5,
        "ids": torch.arange(70, dtype=torch.int32).to(torch.uint16),
        "fp64": torch.randn(3, dtype=torch.float64),
        "plain": {"lr": 0.1, "name": "adamw"},
    }


def blank(full: State) -> State:
    return {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else dict.fromkeys(value)
        for key, value in full.items()
    }


def restored(path: Path, into: State, reader: type[FileSystemReader]) -> State:
    dcp.load(into, storage_reader=reader(path), no_dist=True)
    return into


def same(ours: State, theirs: State) -> bool:
    return all(
        torch.equal(value, theirs[key]) and value.dtype == theirs[key].dtype
        if isinstance(value, torch.Tensor)
        else value == theirs[key]
        for key, value in ours.items()
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save(state(), checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


@pytest.mark.parametrize("kind", ["mmap", "pinned"])
def test_every_kind_of_tensor_comes_back(
    saved: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setattr(
        dcp_files, "open_for_bulk", lambda paths, device: open_reader(paths, device, kind)
    )
    full = state()
    ours = restored(saved, blank(full), CheckpointReader)
    assert same(ours, full)
    assert same(ours, restored(saved, blank(full), FileSystemReader))


def test_only_what_is_not_plain_is_left_to_pytorch(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: set[str] = set()
    theirs = FileSystemReader.read_data

    def spy(self: FileSystemReader, plan: LoadPlan, planner: Any) -> Any:
        left.update(item.storage_index.fqn for item in plan.items)
        return theirs(self, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", spy)
    restored(saved, blank(state()), CheckpointReader)
    assert left == {"transposed", "ids", "plain.lr", "plain.name"}


def test_another_type_or_layout_of_the_target_is_converted(saved: Path) -> None:
    def into() -> State:
        return {"weight": torch.zeros(19, 37).t(), "bf16": torch.zeros(8, 5, 3)}

    theirs = restored(saved, into(), FileSystemReader)
    assert same(restored(saved, into(), CheckpointReader), theirs)
    assert torch.equal(theirs["weight"], state()["weight"])


@pytest.fixture
def as_rank() -> Iterator[Any]:
    """Be one rank of a group whose others don't exist: loading a layout needs no talk."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank: int, world: int) -> Any:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        return init_device_mesh("cpu", (world,))

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("world", [2, 5])
def test_any_layout_loads_its_part(saved: Path, as_rank: Any, placement: Any, world: int) -> None:
    full = state()["weight"]
    for rank in range(world):
        mesh = as_rank(rank, world)
        dim = placement.dim if isinstance(placement, Shard) else 0
        parts = full.chunk(world, dim) if isinstance(placement, Shard) else [full] * world

        def into(of: Any = parts[rank], mesh: Any = mesh) -> State:
            local = torch.zeros_like(of).contiguous()
            options = {"shape": full.shape, "stride": full.stride()}
            return {
                "weight": DTensor.from_local(local, mesh, [placement], run_check=False, **options)
            }

        ours = restored(saved, into(), CheckpointReader)["weight"].to_local()
        theirs = restored(saved, into(), FileSystemReader)["weight"].to_local()
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, parts[rank]), (rank, dim)


def test_a_large_tensor_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE", 8192)
    monkeypatch.setattr(
        dcp_files,
        "open_for_bulk",
        lambda paths, device: open_reader(paths, device, "pinned"),
    )
    full = {"large": torch.randn(301, 77)}
    dcp.save(full, checkpoint_id=tmp_path, no_dist=True)
    assert same(restored(tmp_path, blank(full), CheckpointReader), full)


def test_a_pickle_of_anything_else_is_not_run(saved: Path) -> None:
    import io
    import pickle

    class Evil:
        def __reduce__(self) -> Any:
            return (print, ("run",))

    with pytest.raises(pickle.UnpicklingError, match=r"builtin.*\.print is not of a plain tensor"):
        dcp_files._Header(io.BytesIO(pickle.dumps(Evil(), 2))).load()


def test_two_tensors_are_checked_at_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2)
    crc32 = zlib.crc32

    def once_two_are_here(content: Any) -> int:
        together.wait(10)
        return crc32(content)

    monkeypatch.setattr(checksums, "zlib", SimpleNamespace(crc32=once_two_are_here))
    full = {name: state()[name] for name in ("weight", "bf16")}
    assert same(restored(saved, blank(full), CheckpointReader), full)


def test_a_damaged_tensor_is_named(saved: Path) -> None:
    file = saved / "__0_0.distcp"
    content, weight = bytearray(file.read_bytes()), state()["weight"].numpy().tobytes()
    content[content.index(weight) + 100] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointException, match=r"__0_0\.distcp: weight is damaged"):
        restored(saved, blank(state()), CheckpointReader)


def test_pieces_have_the_checksum_of_the_whole() -> None:
    content = torch.arange(1000).to(torch.uint8)
    found = checksums.checksum_by_pieces(content, torch.empty(64, dtype=torch.uint8))
    assert found == zlib.crc32(content.numpy().data)
