"""NVIDIA's container toolkit, which puts the host's driver into containers."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from pipelines.doctor.findings import FaultError, NotHereError, Seen, ok, problem, warning
from pipelines.doctor.smi import mend_of, smi
from pipelines.doctor.tools import output_of

_IN_CONTAINER = (Path("/.dockerenv"), Path("/run/.containerenv"))
_PODS = "KUBERNETES_SERVICE_HOST"
_INSTALL = "install nvidia-container-toolkit, then nvidia-ctk runtime configure"


def container_toolkit() -> Iterator[Seen]:
    """Whether containers on this host can be given its GPUs."""
    if _PODS in os.environ or any(path.exists() for path in _IN_CONTAINER):
        raise NotHereError("this is a container itself; the toolkit is the host's")
    driver = smi().driver
    try:
        text = output_of("nvidia-container-cli", "info")
    except NotHereError:
        yield warning("no nvidia-container-cli: containers get no GPUs here", _INSTALL)
        return
    except FaultError as error:
        raise FaultError(str(error), mend_of(str(error), error.mend)) from None
    yield judge(text, driver)


def judge(text: str, driver: str) -> Seen:
    """Of `nvidia-container-cli info`."""
    values = dict(re.findall(r"^([\w ]+):\s+(.+)$", text, re.MULTILINE))
    found = values.get("NVRM version", "").strip()
    gpus = len(re.findall(r"^Device Index:", text, re.MULTILINE))
    if found != driver:
        mend = "remove the other driver's libraries, or reboot after an update"
        return problem(f"the toolkit finds driver {found}, nvidia-smi {driver}", mend)
    return ok(f"containers get driver {found} and {gpus} GPU{'s' * (gpus != 1)}")
