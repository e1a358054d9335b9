"""What an export starts from, checked, and the new folder that it fills.

A registered folder holds more than serving needs (its signature, the adapter alone), and whatever a
user put there since. Only files of formats that hold data and run nothing are taken over.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.storage import fresh_folder
from pipelines.models.model_folder import CONFIG, is_quantized, read_object, weight_files
from pipelines.registry.integrity import check_folder

_DATA = (".json", ".jinja", ".txt", ".md")  # beside the weights


def companion_files(folder: Path) -> list[Path]:
    """What goes with the weights: config, tokenizer, chat template, model card, lineage.

    Raises:
        UserError: see `check`.
    """
    weights = {path.name for path in check(folder)}
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [path for path in files if path.suffix in _DATA and path.name not in weights]


def check_whole(folder: Path) -> list[Path]:
    """As `check`, of a folder whose weights may be rounded or traced.

    Raises:
        UserError: they are codes of 8 or 4 bits already.
    """
    if is_quantized(folder):
        raise UserError(
            f"{folder}: its weights are quantised already, as they were measured and compared; "
            "--format huggingface or triton takes them as they are"
        )
    return check(folder)


def check(folder: Path) -> list[Path]:
    """The weight files of a folder that can be loaded without running anything of it.

    Raises:
        UserError: no weights, or a file that no model may hold; see `integrity.check_folder`.
    """
    check_folder(folder, str(folder))
    read_object(folder / CONFIG)
    return weight_files(folder)


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
