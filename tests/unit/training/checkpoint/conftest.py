"""Places for checkpoints."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.s3_server import s3_bucket


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder, and a prefix in S3."""
    if request.param == "folder":
        yield str(tmp_path / "check points")
        return
    with s3_bucket("bucket"):
        yield f"s3://bucket/runs/{tmp_path.name}"
