"""A workspace's code as a Ray package, for a cluster whose nodes run it from their own disks."""

import hashlib
import io
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.orchestration.jobs_api import JobsApi

CODE = ("pipelines", "ray_jobs")  # what our Ray jobs import of a workspace
_EPOCH = (1980, 1, 1, 0, 0, 0)  # zip knows no earlier time; the same content is the same package


async def upload_code(jobs: JobsApi, workspace: Path, names: Iterable[str]) -> str:
    """Upload files and folders of the workspace and return the package's URI.

    The package is named by its content: one that the cluster has is not sent again.

    Raises:
        UserError: a name is neither a file nor a folder there.
    """
    package = pack(workspace, names)
    digest = hashlib.sha256(package).hexdigest()[:32]
    return await jobs.upload(f"_ray_pkg_{digest}.zip", package)


def pack(workspace: Path, names: Iterable[str]) -> bytes:
    """A zip of the files, without bytecode and hidden ones; equal content gives equal bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as package:
        for path in sorted(_files(workspace, names)):
            info = zipfile.ZipInfo(path.relative_to(workspace).as_posix(), _EPOCH)
            info.external_attr = 0o644 << 16
            package.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


def _files(workspace: Path, names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        place = workspace / name
        if place.is_file():
            yield place
        elif place.is_dir():
            files = (path for path in place.rglob("*") if path.is_file())
            yield from (path for path in files if _is_code(path.relative_to(workspace)))
        else:
            raise UserError(f"{place}: no such file or folder to ship to Ray")


def _is_code(path: Path) -> bool:
    return not any(part == "__pycache__" or part.startswith(".") for part in path.parts)
