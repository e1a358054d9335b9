"""Sees every operator of a step on its way to the fake device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from pipelines.training.dry_run.collective_log import CollectiveLog
from pipelines.training.dry_run.memory_count import MemoryCount
from pipelines.training.dry_run.wait_log import WaitLog
from pipelines.training.hooks import Phase

_PLAIN = torch.ops.prim.device.default  # asked for each tensor, and nothing to see
_READ = torch.ops.aten._local_scalar_dense.default


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts memory, waits, collectives and FLOPs.

    Attributes:
        flops: Of matrix products and attention in the step, forward, backward and recomputed.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        fake: FakeTensorMode,
        memory: MemoryCount,
        waits: WaitLog,
        collectives: CollectiveLog,
        repeats: int,
    ) -> None:
        """Observe operators in `fake`.

        Args:
            fake: The mode of the step; DTensor computes shapes in others.
            memory: Is told of each tensor.
            waits: Is told of each operator.
            collectives: Is told of each operator of the last step.
            repeats: How often the step's first micro-batch stands for one in a real step.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self._fake, self._memory, self._waits, self._collectives = fake, memory, waits, collectives
        self._repeats = repeats
        self._times = 1
        self._begun = 0  # micro-batches of this step
        self._counts = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile, and show what a graph runs."""
        return True

    def begin_last_step(self) -> None:
        """Count from now on."""
        self._counts = self._waits.is_on = True
        self._memory.begin()

    def enter_phase(self, phase: Phase) -> None:
        """Note what the step does now."""
        if phase == "forward and backward":
            self._begun += 1
        elif phase == "optimizer":
            self._begun = 0
        self._memory.new = "activations" if self._begun else "buffers"
        is_first = phase == "forward and backward" and self._begun == 1
        self._times = self._repeats if is_first and self._counts else 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See also storages that change their size, which no operator does."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self._memory.resize(storage)

        with patch.object(torch.UntypedStorage, "resize_", resized), self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is _PLAIN:
            return func(*args)
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its parts come here by themselves
        if active_fake_mode() is not self._fake:
            return func(*args, **named)
        self._waits.see(func, args, named)
        if func is _READ:
            return _number(args[0])
        result = func(*args, **named)
        self._memory.see(func, args, named, result)
        if self._counts:
            self._collectives.see(func, args, result, self._times)
            self._count_flops(func, args, named, result)
        return result

    def _count_flops(self, func: Any, args: Any, named: dict[str, Any], result: Any) -> None:
        formula = flop_registry.get(getattr(func, "_overloadpacket", func))
        if formula is not None:
            self.flops += self._times * formula(*args, **named, out_val=result)


def _number(tensor: torch.Tensor) -> bool | int | float:
    """Return a scalar's number; one for a fake scalar that has none."""
    known = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if known is not None:
        with _disable_current_modes():
            number: bool | int | float = known.item()
            return number
    if tensor.dtype == torch.bool:
        return False
    return 0.0 if tensor.dtype.is_floating_point else 0
