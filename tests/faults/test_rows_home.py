"""Row 25: a second machine starts a platform in the home of one that is up, on shared storage."""

import subprocess

import pytest

from tests.conftest import PENSTOCK

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

# A name, a network and temporary files of its own; the home is shared.
_ELSEWHERE = 'hostname second && mount -t tmpfs tmpfs "$0" && ip link set lo up && exec "$1" "$2"'


def test_row_25_a_second_platform_in_the_same_home(scenario, reference):
    run = scenario.start()
    run.wait_for_step()
    for command in ("up", "down"):
        refused = elsewhere(scenario.platform, command)
        assert refused.returncode == 2, refused.stderr
        line = refused.stderr.splitlines()[-1]
        assert "belongs to the platform that is up on " in line
        scenario.holds(f"`penstock {command}` there: {line}")
    scenario.ends_well(run, like=reference)
    assert scenario.platform.penstock("status").returncode == 0


def elsewhere(platform, command: str) -> subprocess.CompletedProcess[str]:
    """A command of `penstock` on another machine; skips the test where there can be none."""
    machine = ["unshare", "--uts", "--mount", "--net", "--pid", "--fork"]
    if (tried := subprocess.run([*machine, "true"], capture_output=True, text=True)).returncode:
        pytest.skip(f"no other machine can be made here: {tried.stderr.strip()}")
    return subprocess.run(
        [*machine, "sh", "-c", _ELSEWHERE, str(platform.runtime), PENSTOCK, command],
        env=platform.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
