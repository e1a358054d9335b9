"""What an export starts from, checked, and the new folder that it fills.

A registered folder holds more than serving needs (its signature, the adapter alone), and whatever a
person put there since. Only files of formats that hold data and run nothing are taken over.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.storage import fresh_folder
from pipelines.models.folder import CONFIG, read_object, weight_files
from pipelines.models.safetensors_files import SafetensorsFiles

_DATA = (".json", ".jinja", ".txt", ".model", ".md")  # beside the weights; .model: sentencepiece's
_CODE = (".py", ".so")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
_REMOTE_CODE = "auto_map"  # names classes of a folder's own Python files


def companion_files(folder: Path) -> list[Path]:
    """What goes with the weights: config, tokenizer, chat template, model card, lineage.

    Raises:
        UserError: the folder holds, or asks for, something that runs; see `check`.
    """
    weights = {path.name for path in check(folder)}
    return [path for path in _files(folder) if path.suffix in _DATA and path.name not in weights]


def check(folder: Path) -> list[Path]:
    """The weight files of a folder that can be loaded without running anything of it.

    Raises:
        UserError: no weights or broken ones, a pickle, code, a link, or a config that asks for
            code.
    """
    for path in _files(folder):
        if path.is_symlink():
            raise UserError(f"{path}: a link; a model's folder holds its files themselves")
        if path.suffix in _CODE:
            raise UserError(f"{path}: code; a model's folder holds weights and JSON only")
        if path.suffix in _PICKLES:
            raise UserError(f"{path}: may be a pickle, which can run code; want safetensors")
        if path.suffix == ".json" and _asks_for_code(path):
            raise UserError(f"{path}: {_REMOTE_CODE} asks for code of its own, which is never run")
    read_object(folder / CONFIG)
    weights = weight_files(folder)
    SafetensorsFiles(weights)  # reads the headers: a truncated file is refused
    return weights


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Fill a temporary folder that becomes `path`, whole, when the block ends without an error.

    Raises:
        UserError: something is there already, which is never replaced.
    """
    if path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UserError(f"{path} is there already; --to takes a folder that is not, or is empty")
    with fresh_folder(path.absolute()) as folder:
        yield folder


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_symlink() or path.is_file())


def _asks_for_code(path: Path) -> bool:
    """Lineage and vocabularies aside, which transformers reads no classes from."""
    return path.name.endswith("config.json") and _REMOTE_CODE in read_object(path)
