"""One node of a cluster, as the job looks at it."""

import platform
from importlib.metadata import PackageNotFoundError, version

from pipelines.core.recipe import Recipe
from pipelines.doctor.checks import node_checks
from pipelines.doctor.driver_and_cuda import torch_build
from pipelines.doctor.findings import FaultError, Finding, NotHereError
from pipelines.doctor.running import run_checks
from pipelines.doctor.smi import smi


def examine(recipe: Recipe) -> tuple[dict[str, str | None], list[Finding]]:
    """The versions of what must be alike on every node, and the checks."""
    findings = run_checks(node_checks(recipe))
    return _facts(), findings


def _facts() -> dict[str, str | None]:
    try:
        driver = smi().driver
    except (NotHereError, FaultError):
        driver = None
    try:
        cuda, torch = torch_build()
    except NotHereError:
        cuda, torch = None, None
    return {
        "ray": _version("ray"),
        "python": platform.python_version(),
        "torch": torch,
        "cuda": cuda,
        "driver": driver,
        "penstock": _version("penstock"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
