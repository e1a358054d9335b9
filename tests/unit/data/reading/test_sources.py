import os
import shutil
import time
from pathlib import Path

import pytest

from pipelines.core.errors import UserError
from pipelines.data.reading.sources import fingerprint, list_inputs
from pipelines.recipe.data_section import Source
from tests.processor_time import limit


def files(path: Path | str) -> Source:
    return Source(kind="files", path=str(path))


def paths(source: Source) -> list[str]:
    return [found.path for found in list_inputs(source)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "données et textes"
    for name in ("b.txt", "a.txt", "sub/c.txt", ".git/config", "sub/.DS_Store", "sub/d.jsonl"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


def test_a_folder_is_read_recursively_without_hidden_files(folder: Path) -> None:
    assert paths(files(folder)) == ["a.txt", "b.txt", "sub/c.txt", "sub/d.jsonl"]


def test_what_lies_behind_links_is_read(folder: Path) -> None:
    (folder.parent / "disk").mkdir()
    (folder.parent / "disk/e.txt").write_text("e")
    (folder / "linked").symlink_to(folder.parent / "disk")
    (folder / "sub/again").symlink_to(folder.parent / "disk")
    (folder / "f.txt").symlink_to(folder.parent / "disk/e.txt")
    linked = {"linked/e.txt", "sub/again/e.txt", "f.txt"}
    assert set(paths(files(folder))) == {"a.txt", "b.txt", "sub/c.txt", "sub/d.jsonl", *linked}


@pytest.mark.parametrize("pattern", ["", "sub/*"])
def test_a_link_to_nothing_is_not_passed_over(folder: Path, pattern: str) -> None:
    (folder / "sub/lost.txt").symlink_to(folder.parent / "not mounted")
    with pytest.raises(UserError, match=r"lost\.txt: this link points to no file"):
        list_inputs(files(folder / pattern))


def test_links_in_a_circle_end(folder: Path) -> None:
    (folder / "sub/up").symlink_to(folder)
    with pytest.raises(UserError, match=r"sub/up: links below this folder lead back to it"):
        list_inputs(files(folder))


@pytest.mark.skipif(os.geteuid() == 0, reason="root lists everything")
def test_a_folder_that_may_not_be_listed_is_not_passed_over(folder: Path) -> None:
    (folder / "sub").chmod(0)
    with pytest.raises(UserError, match=r"sub: cannot be listed \(Permission denied\)"):
        list_inputs(files(folder))


def test_a_name_that_is_not_utf8_is_one_line(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("text")
    with pytest.raises(UserError, match=r"the name 'caf\\udce9\.txt' is not UTF-8"):
        list_inputs(files(tmp_path))


def test_a_glob_names_files_from_its_last_plain_folder(folder: Path) -> None:
    assert paths(files(folder / "**/*.txt")) == ["a.txt", "b.txt", "sub/c.txt"]
    assert paths(files(folder / "sub" / "*.jsonl")) == ["d.jsonl"]


def test_a_file_is_named_by_its_name_even_with_wildcards_in_it(tmp_path: Path) -> None:
    odd = tmp_path / "what [really]?.txt"
    odd.write_text("text")
    assert paths(files(odd)) == [odd.name]


def test_the_library_holds_python_files_and_no_installed_package() -> None:
    found = list_inputs(Source(kind="stdlib"))
    assert {"os.py", "json/decoder.py"} <= {entry.path for entry in found}
    assert all(entry.path.endswith(".py") for entry in found)
    assert not [entry.path for entry in found if "-packages" in entry.path]


def test_the_library_is_fingerprinted_in_two_seconds() -> None:
    started = time.process_time()
    facts = fingerprint(Source(kind="stdlib"))
    assert time.process_time() - started < limit(2)
    assert facts["python"]
    assert len(facts["inputs"]) > 200


def test_a_fingerprint_depends_on_relative_paths_and_content_only(folder: Path) -> None:
    moved = folder.parent / "elsewhere"
    shutil.copytree(folder, moved)
    os.utime(moved / "a.txt", (0, 0))
    assert fingerprint(files(moved)) == fingerprint(files(folder))


def test_one_changed_byte_changes_the_fingerprint(folder: Path) -> None:
    before = fingerprint(files(folder))
    (folder / "a.txt").write_text("A.txt")
    assert fingerprint(files(folder)) != before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.txt", "missing.txt: no such file or folder; fix data.source.path"),
        ("empty", "empty: the folder holds no file"),
        ("*.parquet", "*.parquet: the pattern matches no file"),
        ("missing/**/*.txt", "the pattern matches no file"),
    ],
)
def test_nothing_there_is_one_line(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as raised:
        fingerprint(files(tmp_path / path))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("text")
    secret.chmod(0)
    with pytest.raises(UserError, match=r"secret\.txt: cannot be read"):
        fingerprint(files(secret))
