from collections.abc import Callable, Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """The session's processes of a world size: `pool(2).run(function, argument)`."""
    pools: dict[int, Pool] = {}

    def of(world: int) -> Pool:
        return pools.setdefault(world, Pool(world))

    yield of
    for each in pools.values():
        each.close()
