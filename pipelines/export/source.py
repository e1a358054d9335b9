"""The checked source folder of an export, and the new folder that the export fills.

A registered folder holds more than serving needs: its signature, the separate adapter, and any
files that a user added. An export copies only file formats that hold data and cannot run code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.storage import check_new_folder, fresh_folder
from pipelines.models.model_folder import CONFIG, is_quantized, read_object, weight_files
from pipelines.registry.integrity import check_folder

_DATA = (".json", ".jinja", ".txt", ".md")  # file types copied beside the weights


def companion_files(folder: Path) -> list[Path]:
    """Return the files beside the weights: config, tokenizer, chat template, card and lineage.

    Raises:
        UserError: See `check`.
    """
    weights = {path.name for path in check(folder)}
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [path for path in files if path.suffix in _DATA and path.name not in weights]


def check_whole(folder: Path) -> list[Path]:
    """Check a folder as `check` does, and that its weights may be rounded or traced.

    Raises:
        UserError: The weights are quantised to 8 or 4 bits already.
    """
    if is_quantized(folder):
        raise UserError(
            f"{folder}: the weights are quantised already, as they were measured and compared; "
            "use --format huggingface or triton to export them unchanged"
        )
    return check(folder)


def check(folder: Path) -> list[Path]:
    """Return the weight files of a folder that can be loaded without running its code.

    Raises:
        UserError: The folder has no weights, or a forbidden file; see `integrity.check_folder`.
    """
    check_folder(folder, str(folder))
    read_object(folder / CONFIG)
    return weight_files(folder)


@contextmanager
def new_folder(path: Path, made_in: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends without an error.

    Args:
        path: A new or an empty folder.
        made_in: The temporary folder's parent, on the same file system; by default `path`'s.

    Raises:
        UserError: `path` is a file or a folder with files, which is never replaced.
    """
    check_new_folder(path, "--to")
    with fresh_folder(path.absolute(), made_in) as folder:
        yield folder
