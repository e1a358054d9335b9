"""What infrastructure tests ask of this machine, and where they keep what is slow to build."""

import os
import shutil
from pathlib import Path

import pytest

# Base images and binaries, built once: several gigabytes that the next run takes as they are.
CACHE = Path(os.environ.get("PENSTOCK_INFRA_CACHE", Path.home() / ".cache" / "penstock-infra"))
_PLACES = ("/usr/sbin", "/usr/lib/podman", "/usr/lib/cni", "/usr/lib/go-1.19/bin")


def needs(*programs: str) -> None:
    """Skip the test, with the reason, where we are not root or one of the programs is missing."""
    if os.getuid() != 0:
        pytest.skip("needs root, for network namespaces and containers")
    path = os.pathsep.join((os.environ["PATH"], *_PLACES))
    missing = [program for program in programs if shutil.which(program, path=path) is None]
    if missing:
        pytest.skip(f"not installed here: {', '.join(missing)} (make test-infra installs them)")
