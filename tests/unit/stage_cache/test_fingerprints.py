"""Fingerprints that are kept are those that would be computed."""

from pathlib import Path

import pytest

from pipelines.core.errors import UserError
from pipelines.stage_cache import fingerprint
from pipelines.stage_cache.fingerprint import fingerprints, stage_codes


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "code-fingerprints.json"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "pipelines").mkdir(parents=True)
    (folder / "ray_jobs").mkdir()
    (folder / "pipelines" / "count.py").write_text("def run():\n    return 1\n")
    (folder / "dvc.yaml").write_text("stages: {count: {meta: {code: ['pipelines.count:run']}}}\n")
    (folder / "requirements.lock").write_text("numpy==2.3.0\n")
    return folder


def computed(folder: Path) -> dict[str, dict[str, str]]:
    return {stage: code.fingerprints for stage, code in stage_codes(folder).items()}


def test_the_same_code_is_walked_once(
    project: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fingerprints(project)
    assert first == computed(project)
    assert kept.is_file()
    monkeypatch.setattr(fingerprint, "stage_codes", lambda *_: pytest.fail("walked again"))
    assert fingerprints(project) == first


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pipelines/count.py", "def run():\n    return 2\n"),
        ("requirements.lock", "numpy==2.3.1\n"),
        ("dvc.yaml", "stages: {sum: {meta: {code: ['pipelines.count:run']}}}\n"),
        ("pipelines/count.py", "from pipelines.more import a\n\ndef run():\n    return a()\n"),
    ],
)
def test_a_change_is_seen(project: Path, file: str, text: str) -> None:
    (project / "pipelines" / "more.py").write_text("def a():\n    return 3\n")
    fingerprints(project)
    (project / file).write_text(text)
    assert fingerprints(project) == computed(project)


@pytest.mark.parametrize("text", ["", "{", "{}"])
def test_a_kept_file_that_is_not_whole_costs_a_second(project: Path, kept: Path, text: str) -> None:
    fingerprints(project)
    kept.write_text(text)
    assert fingerprints(project) == computed(project)


def test_an_entry_that_is_gone_is_still_one_line(project: Path) -> None:
    fingerprints(project)
    (project / "pipelines" / "count.py").write_text("def other():\n    return 1\n")
    with pytest.raises(UserError, match=r"there is no pipelines\.count:run"):
        fingerprints(project)
