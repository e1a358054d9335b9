"""Rows that leave the shared platform alone, beside whose rows they may run.

A file that has a platform has its own, and so its own watch and its own run without a fault.
"""

from collections.abc import Iterator

import pytest

from tests.conftest import Platform
from tests.faults.checks import JobsWatch
from tests.faults.conftest import unhurt, watched
from tests.faults.pipeline_run import PipelineRun


@pytest.fixture(scope="module")
def watch(platform: Platform) -> Iterator[JobsWatch]:
    with watched(platform) as watch:
        yield watch


@pytest.fixture(scope="module")
def reference(platform: Platform, watch: JobsWatch) -> PipelineRun:
    return unhurt(platform, watch)
