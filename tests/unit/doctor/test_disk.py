"""The home's disk: its mount by the kernel's table, its speed by writing."""

from pathlib import Path

import pytest

from pipelines.doctor import disk
from pipelines.doctor.host import existing, mount_of
from pipelines.recipe.recipe_files import load_recipe
from tests.unit.doctor.recordings import told

GONE = "what lies there goes with the machine or container"
MOUNTINFO = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 27 0:40 / /data rw,noatime - xfs /dev/md127 rw,attr2
31 27 0:41 / /data/my\\040runs rw,relatime - nfs4 nas:/runs rw,vers=4.2,rsize=1048576,wsize=1048576,hard
32 30 0:42 / /data/ssd rw - ext4 /dev/sda rw
33 30 0:43 / /data/ssd rw - tmpfs none rw
"""  # noqa: E501 (as the kernel writes it)


@pytest.mark.parametrize(
    ("path", "kind", "source"),
    [
        ("/home/me", "ext4", "/dev/vda"),
        ("/data", "xfs", "/dev/md127"),
        ("/database", "ext4", "/dev/vda"),
        ("/data/my runs/1", "nfs4", "nas:/runs"),
        ("/data/ssd/x", "tmpfs", "none"),  # which lies over the drive
    ],
)
def test_a_path_is_on_the_mount_above_it(path, kind, source):
    mount = mount_of(Path(path), MOUNTINFO)
    assert (mount.kind, mount.source) == (kind, source)


def test_the_options_of_nfs_are_read():
    options = mount_of(Path("/data/my runs"), MOUNTINFO).options
    assert (options["rsize"], options["vers"], "hard" in options) == ("1048576", "4.2", True)


@pytest.mark.parametrize(
    ("old", "new", "path", "lines"),
    [
        ("", "", "/data", [("ok", "/data is xfs on /dev/md127")]),
        ("", "", "/data/my runs", [("ok", "/data/my runs is nfs4 on nas:/runs, over the network")]),
        (
            "hard",
            "soft",
            "/data/my runs",
            [("problem", "/data/my runs is nfs4 on nas:/runs, soft")],
        ),
        (
            "rsize=1048576",
            "rsize=65536",
            "/data/my runs",
            [("warning", "/data/my runs is nfs4 on nas:/runs with rsize=65536")],
        ),
        ("/data rw,", "/data ro,", "/data", [("problem", "/data is xfs on /dev/md127, read-only")]),
        ("", "", "/data/ssd", [("warning", f"/data/ssd is tmpfs on none: {GONE}")]),
    ],
)
def test_a_mount_that_loses_or_dawdles_is_told(old, new, path, lines):
    mount = mount_of(Path(path), MOUNTINFO.replace(old, new, 1) if old else MOUNTINFO)
    assert told(disk.assess_mount(mount)) == lines


def test_a_folder_that_is_yet_to_be_made_is_where_its_parent_is(tmp_path):
    assert existing(tmp_path / "not" / "yet") == tmp_path.resolve()


def test_a_disk_that_can_not_be_written_is_told(monkeypatch):
    monkeypatch.setenv("PENSTOCK_HOME", "/proc/self")
    ((state, saw),) = told(disk.speed(load_recipe("debug")))
    assert state == "problem"
    assert "can't be written: " in saw


def test_the_disk_is_measured_within_a_second_or_two_and_left_clean(tmp_path):
    found = disk.measure(tmp_path)
    assert found.write > 0
    assert found.read > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("recipe", "overrides", "bytes_"),
    [
        # GPT-2's 124,439,808 numbers, with the vocabulary that its recipe rounds up to.
        ("gpt2-124m", (), (12 * 124_000_000, 12 * 125_500_000)),
        ("gpt2-124m", ("model.init_from=some/folder",), (0, 0)),
        ("gpt2-124m", ("adapter.kind=lora",), (0, 0)),
    ],
)
def test_a_checkpoint_is_weights_and_moments(recipe, overrides, bytes_):
    least, most = bytes_
    assert least <= disk.checkpoint_bytes(load_recipe(recipe, overrides)) <= most


@pytest.mark.parametrize(
    ("checkpoint", "state"), [(0, "ok"), (100 * 10**9, "ok"), (1000 * 10**9, "warning")]
)
def test_a_checkpoint_that_all_gpus_wait_for_is_told(checkpoint, state):
    ((found, saw),) = told(disk.assess_disk_speed(disk.Speed(1e9, 2e9), checkpoint))
    assert found == state
    assert "writes 1 GB/s, reads 2 GB/s" in saw
