"""What a Hugging Face folder says of itself.

No torch here: a folder that can't be trained on is refused before anything starts.
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError
from pipelines.core.storage import read_json
from pipelines.models.config import DecoderConfig
from pipelines.models.families import read_config

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_QUANTIZED = "quantization_config"  # in it
_PIECES, _PIECE_BYTES = 64, 1 << 16  # of a file, for its fingerprint


def load_config(folder: Path) -> DecoderConfig:
    """The shape of the model in a Hugging Face folder.

    Raises:
        UserError: no such folder, a broken `config.json`, or a model that this decoder is not.
    """
    path = folder / CONFIG
    return read_config(read_object(path), path)


def fingerprint(folder: Path) -> str:
    """Which weights these are: a hash of names, sizes and 4 MB of each safetensors file.

    The whole of a large model takes minutes to hash; the pieces, its header among them, are spread
    evenly, and any training changes them.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\n".encode())
        with path.open("rb") as file:
            for piece in range(_PIECES):
                file.seek(piece * size // _PIECES)
                digest.update(file.read(min(_PIECE_BYTES, -(-size // _PIECES))))
    return digest.hexdigest()


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a folder; raises UserError where it is missing or broken."""
    if not path.is_file():
        raise UserError(f"{path.parent}: no {path.name}; give a folder in Hugging Face's format")
    try:
        values = read_json(path)
    except ValueError as error:  # of JSON or of UTF-8
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object; give a folder in Hugging Face's format")
    return values


def is_quantized(folder: Path) -> bool:
    """Whether the weights are codes of 8 or 4 bits."""
    return _QUANTIZED in read_object(folder / CONFIG)


def is_int4(folder: Path) -> bool:
    """Whether they are torchao's codes of 4 bits."""
    how = read_object(folder / CONFIG).get(_QUANTIZED, {})
    return str(how.get("quant_type", {}).get("default", {}).get("_type")).startswith("Int4")


def has_int4_kernels() -> bool:
    """Whether torchao can compute with these here: its kernels are for GPUs only."""
    return find_spec("mslk") is not None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder.

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
    paths = [index.parent / name for name in sorted(set(weight_map.values()))]
    for path in paths:
        if path.parent != index.parent or path.name == "..":
            raise UserError(f"{index}: names {path}, which lies outside of the folder")
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: missing, but {index.name} names it")
    return paths
