"""The package is the code and nothing else, and the same for the same content."""

import io
import os
import zipfile

import pytest

from pipelines.core.errors import UserError
from pipelines.core.product import CODE
from pipelines.core.settings import PROJECT
from pipelines.orchestration.jobs_api import pack


@pytest.fixture
def workspace(tmp_path):
    for name in ("code/one.py", "code/deep/two.yaml", "code/__pycache__/one.pyc", "code/.hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "data.bin").write_text("data")
    (tmp_path / "probe.py").write_text("probe")
    return tmp_path


def test_code_without_bytecode_hidden_files_and_data(workspace):
    with zipfile.ZipFile(io.BytesIO(pack(workspace, ["code", "probe.py"]))) as package:
        assert package.namelist() == ["code/deep/two.yaml", "code/one.py", "probe.py"]
        assert package.read("code/one.py") == b"code/one.py"


def test_equal_content_is_an_equal_package_whenever_it_was_written(workspace):
    before = pack(workspace, ["code"])
    os.utime(workspace / "code/one.py", (0, 0))
    assert pack(workspace, ["code"]) == before
    (workspace / "code/one.py").write_text("changed")
    assert pack(workspace, ["code"]) != before


def test_what_is_not_there_is_one_line(workspace):
    with pytest.raises(UserError, match="cod: there is no such file or folder"):
        pack(workspace, ["cod"])


def test_the_projects_own_code_is_small():
    package = pack(PROJECT, CODE)
    assert len(package) < 2 * 2**20
    with zipfile.ZipFile(io.BytesIO(package)) as content:
        assert {"ray_jobs/train.py", "pipelines/recipes/debug.yaml"} <= set(content.namelist())
