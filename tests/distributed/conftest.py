from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipelines.run.records import Split
from tests.distributed.pool import Pool
from tests.distributed.training import make_data


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only get in each other's way on tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")  # processes that wait for each other keep a core a little busy
def pool() -> Iterator[Callable[[int], Pool]]:
    """The processes of a world size, for all tests here: `pool(2).run(function, argument)`.

    Those of one size only: others, though they wait, would take a share of the processors.
    """
    pools: dict[int, Pool] = {}

    def of(world: int) -> Pool:
        for each in pools.values():
            if each.world != world:
                each.close()
        return pools.setdefault(world, Pool(world))

    yield of
    for each in pools.values():
        each.close()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Split]:
    """The folder and the split that tiny models learn from."""
    folder = tmp_path_factory.mktemp("data")
    return folder, make_data(folder)
