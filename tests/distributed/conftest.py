from collections.abc import Callable, Iterator

import pytest
import torch

from tests.distributed.pool import Pool


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only get in each other's way on tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """The session's processes of a world size: `pool(2).run(function, argument)`."""
    pools: dict[int, Pool] = {}

    def of(world: int) -> Pool:
        return pools.setdefault(world, Pool(world))

    yield of
    for each in pools.values():
        each.close()
