from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pipelines.core.errors import UserError
from pipelines.models.safetensors_files import SafetensorsFiles, header_bytes, write_one_by_one

CPU = torch.device("cpu")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two, as of a sharded model, with every type that safetensors knows and odd shapes."""
    torch.manual_seed(0)
    floats = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    whole = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "bool")
    first = {name: torch.randn(5, 3).to(getattr(torch, name)) for name in floats}
    second = {name: torch.arange(7).to(getattr(torch, name)) for name in whole}
    second |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 3)}
    paths = [tmp_path / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_file(first, paths[0], metadata={"format": "pt"})
    save_file(second, paths[1])
    return paths


def test_every_tensor_is_what_safetensors_itself_reads(files: list[Path]) -> None:
    expected = load_file(files[0]) | load_file(files[1])
    found = dict(SafetensorsFiles(files).read(CPU))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def cut(content: bytes) -> bytes:
    return content[:-1]


def longer(content: bytes) -> bytes:
    return content + b"\0"


def no_header(content: bytes) -> bytes:
    return content[:5]


def endless_header(content: bytes) -> bytes:
    return b"\xff" * 8 + content[8:]


def no_json(content: bytes) -> bytes:
    return content[:8] + b"!" + content[9:]


def unknown_type(content: bytes) -> bytes:
    return content.replace(b'"F32"', b'"F99"')


def other_shape(content: bytes) -> bytes:
    return content.replace(b"[5,3]", b"[5,4]")


@pytest.mark.parametrize(
    "damage", [cut, longer, no_header, endless_header, no_json, unknown_type, other_shape]
)
def test_a_damaged_file_is_one_line(files: list[Path], damage: Callable[[bytes], bytes]) -> None:
    files[0].write_bytes(damage(files[0].read_bytes()))
    with pytest.raises(UserError, match=r"00001-of-00002.*the weights can't be read") as raised:
        SafetensorsFiles(files)
    assert "\n" not in str(raised.value)


def test_a_file_cut_behind_its_header_is_one_line(files: list[Path]) -> None:
    found = SafetensorsFiles(files)
    files[1].write_bytes(files[1].read_bytes()[:-9])
    with pytest.raises(UserError, match="truncated"):
        list(found.read(CPU))


@pytest.mark.parametrize("before", [0, 100_000])
def test_a_file_written_one_by_one_is_what_safetensors_reads(tmp_path: Path, before: int) -> None:
    tensors = {
        "b.weight": torch.randn(3, 5).t(),
        "a.bias": torch.arange(4, dtype=torch.int64),
        "none": torch.empty(0, 7, dtype=torch.bfloat16),
        "one": torch.tensor(2.5, dtype=torch.float16),
        "flag": torch.tensor([True, False]),
    }
    path = tmp_path / "written.safetensors"
    path.write_bytes(b"x" * before)
    written = write_one_by_one(path, iter(tensors.items()), {"format": "pt", "note": "ü"}, 600)
    assert written == {name: tensor.nbytes for name, tensor in tensors.items()}
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "ü"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)
            assert file.get_tensor(name).dtype == tensor.dtype
    places = SafetensorsFiles([path]).places
    assert list(places) == list(tensors)
    assert header_bytes(path) % 4096 == 4096 - 8
    assert places["b.weight"].offset == 8 + header_bytes(path)


def test_a_header_that_needs_more_room_is_an_error(tmp_path: Path) -> None:
    tensors = {f"a tensor with a long name, number {number}": torch.ones(1) for number in range(99)}
    with pytest.raises(ValueError, match="more than 4088"):
        write_one_by_one(tmp_path / "long", tensors.items(), {}, 99)
