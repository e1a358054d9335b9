"""Reading and checking the files of a model folder in Hugging Face's format.

It imports no torch, so an unsuitable folder is refused before anything starts.
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipelines.core import storage
from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.models.config_json import read_config

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_QUANTIZED = "quantization_config"  # key in config.json
_COMPRESSED = "compressed-tensors"  # a library's name, and of its method there
_PIECES, _PIECE_BYTES = 64, 1 << 16  # what a fingerprint reads of each file


def load_config(folder: Path) -> DecoderConfig:
    """Return the shape of the model in a Hugging Face folder.

    Raises:
        UserError: there is no folder, `config.json` is broken, or the model is not supported.
    """
    path = folder / CONFIG
    return read_config(read_object(path), path)


def fingerprint(folder: Path) -> str:
    """Return a hash of the weights: the name, size and 4 MB of each safetensors file.

    Hashing the whole of a large model takes minutes. The 4 MB are pieces spread evenly over the
    file, including its header, and any training changes them.
    """
    digest = hashlib.sha256()
    for path in sorted(filter(Path.is_file, folder.glob("*.safetensors"))):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\n".encode())
        with path.open("rb") as file:
            for piece in range(_PIECES):
                file.seek(piece * size // _PIECES)
                digest.update(file.read(min(_PIECE_BYTES, -(-size // _PIECES))))
    return digest.hexdigest()


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise UserError if it is missing or broken."""
    if not path.is_file():
        raise UserError(f"{path.parent}: no {path.name}; give a folder in Hugging Face's format")
    return storage.read_object(path)


def is_quantized(folder: Path) -> bool:
    """Return whether the weights are quantized to 8 or 4 bits."""
    return _QUANTIZED in read_object(folder / CONFIG)


def stated_type(folder: Path) -> str | None:
    """Return the type of the weights that `config.json` states, as `bfloat16`."""
    values = read_object(folder / CONFIG)
    return values.get("dtype") or values.get("torch_dtype")  # the older name


def is_int4(folder: Path) -> bool:
    """Return whether torchao quantized the weights to 4 bits."""
    how = read_object(folder / CONFIG).get(_QUANTIZED, {})
    return str(how.get("quant_type", {}).get("default", {}).get("_type")).startswith("Int4")


def is_compressed(folder: Path) -> bool:
    """Return whether the weights are in the format of compressed-tensors."""
    how = read_object(folder / CONFIG).get(_QUANTIZED, {})
    return bool(how.get("quant_method") == _COMPRESSED)


def has_int4_kernels() -> bool:
    """Return whether torchao's 4-bit kernels, which need a GPU, are installed."""
    return find_spec("mslk") is not None


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder.

    Raises:
        UserError: there are none, or one that the index names is missing.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return _indexed(folder / INDEX)
    pickles = [p.name for suffix in ("bin", "pt", "pth") for p in folder.glob(f"*.{suffix}")]
    if pickles:
        raise UserError(f"{folder}: {pickles[0]} is a pickle, which can run code; want {WEIGHTS}")
    raise UserError(f"{folder}: no {WEIGHTS}")


def _indexed(index: Path) -> list[Path]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: no 'weight_map' in it; the file is broken")
    paths = [index.parent / name for name in sorted(set(map(str, weight_map.values())))]
    for path in paths:
        if path.parent != index.parent or path.name == ".." or len(path.name) > 255:
            raise UserError(f"{index}: names {path}, which lies outside of the folder")
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: missing, but {index.name} names it")
    return paths
