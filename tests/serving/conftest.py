"""The real Triton that its tests share."""

from collections.abc import Iterator

import pytest

from tests.serving.triton_program import Triton, served


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """A server that loads a model when it is told to."""
    with served(tmp_path_factory.mktemp("triton"), "--model-control-mode=explicit") as server:
        yield server
