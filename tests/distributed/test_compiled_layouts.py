"""Compiled blocks are checked in the run's layout, and a mistake on one process ends all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd

from pipelines.core.errors import SharedError
from pipelines.parallel import parallelize
from tests.compiling import needs_a_linker
from tests.distributed.pool import Pool
from tests.distributed.test_loss_parity import FULL
from tests.unit.training.test_compile_check import check, untouched, wrong

pytestmark = needs_a_linker


def checked(parallel: dict[str, Any], mistaken: int | None) -> str | None:
    """The check's error, with blocks whose compiler makes a mistake on one process."""
    torch._dynamo.reset()
    plain = parallelize.compile_blocks
    compiler = wrong if dist.get_rank() == mistaken else untouched
    backend = aot_autograd(fw_compiler=untouched, bw_compiler=compiler)
    parallelize.compile_blocks = lambda part, options: plain(part, backend=backend)
    try:
        check(parallel=parallel, train={"global_batch_size": 8})
    except SharedError as error:
        return str(error)
    finally:
        parallelize.compile_blocks = plain
    return None


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({}, id="ddp"),
        pytest.param(FULL, id="zero-3"),
        pytest.param({"tp": 2}, id="tp"),
        pytest.param({"cp": 2}, id="cp"),
        pytest.param({"pp": 2, "schedule": "interleaved_1f1b"}, id="pp"),
    ],
)
def test_a_layout_is_checked_as_it_is(
    parallel: dict[str, Any], pool: Callable[[int], Pool]
) -> None:
    assert pool(2).run(checked, parallel, None) == [None, None]
    for told in pool(2).run(checked, parallel, 1):
        assert "the gradient of" in (told or "")
