"""The project's files as they are now, elsewhere."""

import shutil
import subprocess
from pathlib import Path

from pipelines.core.settings import PROJECT


def copy_project(folder: Path) -> None:
    """Copy what git tracks, and what it would if it were added, into `folder`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (PROJECT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, folder / name)
