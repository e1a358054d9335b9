"""One registered model for all; exports don't change it, and a test holds that."""

from pathlib import Path

import pytest
import torch

from pipelines.core.storage import folder_hash
from tests.unit.export.models import small, write_registered


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def registered(tmp_path_factory: pytest.TempPathFactory):
    folder = write_registered(small(), tmp_path_factory.mktemp("export") / "registered")
    before = folder_hash(folder)
    yield folder
    assert folder_hash(folder) == before


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    folder.mkdir()
    return folder
