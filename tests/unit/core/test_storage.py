"""Files are whole or absent."""

import pytest

from pipelines.core.storage import (
    MARKER,
    folder_hash,
    fresh_folder,
    mark_complete,
    read_json,
    what_is_full,
    write_json,
    write_text,
)
from tests.faults.small_disk import full, out_of_inodes, small_disk


def test_a_failed_write_leaves_the_old_content_and_no_litter(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_equal_values_are_equal_bytes(tmp_path):
    write_json(tmp_path / "a", {"x": 1, "y": "é"})
    write_json(tmp_path / "b", {"y": "é", "x": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_secrets_can_be_private(tmp_path):
    write_text(tmp_path / "token", "x", mode=0o600)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "out"
    with pytest.raises(RuntimeError), fresh_folder(target) as folder:
        (folder / "half").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with fresh_folder(target) as folder:
        (folder / "whole").touch()
    with fresh_folder(target) as folder:
        (folder / "second").touch()
    assert [path.name for path in target.iterdir()] == ["second"]


def test_the_marker_is_what_completes_a_folder(tmp_path):
    mark_complete(tmp_path, {"step": 3})
    assert read_json(tmp_path / MARKER) == {"step": 3}


def test_a_folders_hash_follows_names_and_content(tmp_path):
    (tmp_path / "a").write_text("1")
    first = folder_hash(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    second = folder_hash(tmp_path)
    (tmp_path / "b").write_text("2")
    assert len({first, second, folder_hash(tmp_path)}) == 3


def test_a_disk_without_inodes_is_not_said_to_be_full_of_bytes(tmp_path):
    with small_disk(tmp_path / "disk", 8, inodes=50) as disk:
        with out_of_inodes(disk), pytest.raises(OSError, match="No space left") as caught:
            (disk / "one more").touch()
        assert "no inodes" not in what_is_full(caught.value, disk)  # there are some again
        with out_of_inodes(disk):
            assert what_is_full(caught.value, disk).startswith("no inodes are left there")
            assert "no inodes" not in what_is_full(PermissionError("no"), disk)
        with full(disk):
            assert "no inodes" not in what_is_full(caught.value, disk)
