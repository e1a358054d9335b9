"""The dry run of a rank whose step has a fault that DRY_RUN_FAULT names."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from pipelines.parallel import data_parallel
from pipelines.training import forward_backward, trainer
from pipelines.training.dry_run.__main__ import main
from pipelines.training.dry_run.dry_run import HOST_BYTES

_norm, _factor, _sync_if = trainer.gradient_norm, trainer.clip_factor, data_parallel.sync_if


def reads_a_number(*arguments: Any) -> Tensor:
    """The gradient's norm, which the host reads."""
    norm = _norm(*arguments)
    norm.item()
    return norm


def on_the_host(norm: Tensor, limit: float) -> Tensor:
    """The factor of clipping, left on the host."""
    return _factor(norm.new_ones((), device="cpu"), limit)


def computes_for_real(norm: Tensor, limit: float) -> Tensor:
    """The factor of clipping, and what a model takes that is made by mistake."""
    assert bytearray(HOST_BYTES)
    return _factor(norm, limit)


@contextmanager
def never_exchanges(_is_last: bool, part: nn.Module) -> Iterator[None]:
    """Gradients of replicas, which stay what each replica has."""
    with _sync_if(False, part):
        yield


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "number": (trainer, "gradient_norm", reads_a_number),
    "host": (trainer, "clip_factor", on_the_host),
    "memory": (trainer, "clip_factor", computes_for_real),
    "exchange": (forward_backward, "sync_if", never_exchanges),
}

if __name__ == "__main__":
    with patch.object(*FAULTS[os.environ["DRY_RUN_FAULT"]]):
        main()
