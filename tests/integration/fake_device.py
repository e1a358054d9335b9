"""An accelerator of another make, in Python alone: its memory is the host's, its kernels the CPU's.

It comes in by PyTorch's door for out-of-tree back ends (PrivateUse1), as a vendor's NPU does. Its
tensors are none of the CPU: to mix them is an error, as on any accelerator. Run as a program, it
trains: `python -m tests.integration.fake_device --recipe debug`.
"""

import sys
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "npu"
_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default, _aten._foreach_copy_.default}
_libraries: list[torch.library.Library] = []  # what they register lives as long as they do


class DeviceTensor(torch.Tensor):
    """A tensor of the device; `host` has its numbers."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "DeviceTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
        )
        made.host = host
        return made

    def tolist(self) -> Any:
        """Refused by PyTorch for every class but its own."""
        return self.host.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, *args, **(kwargs or {}))


def compute(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator, on the host's memory; what it returns is of the device unless sent elsewhere."""
    known: dict[int, DeviceTensor] = {}

    def unwrap(x: Any) -> Any:
        if isinstance(x, DeviceTensor):
            known[id(x.host)] = x
            return x.host
        if isinstance(x, torch.Tensor) and x.ndim and func not in _COPIES:
            raise RuntimeError(f"{func}: tensors of {NAME} and of {x.device}")
        return torch.device("cpu") if isinstance(x, torch.device) and x.type == NAME else x

    def wrap(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return known[id(x)] if id(x) in known else DeviceTensor(x)  # in place: the same tensor

    host_args, host_kwargs = tree_map(unwrap, (args, kwargs))
    result = func(*host_args, **host_kwargs)
    if func is _aten.copy_.default:
        return args[0]
    target = kwargs.get("device")
    leaves = target is not None and torch.device(target).type == "cpu"
    return result if leaves else tree_map(wrap, result)


def _copy_from(source: torch.Tensor, target: DeviceTensor, non_blocking: bool = False) -> Any:
    """What `torch.tensor` calls, past all dispatch in Python."""
    return compute(_aten.copy_.default, target, source, non_blocking)


class Module(_DummyBackendModule):
    """`torch.npu`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def current_stream(self, device: Any = None) -> "Stream":
        return Stream()

    def stream(self, stream: "Stream") -> "Stream":
        return stream


class Stream:
    """There is but one queue, and it is never behind."""

    def __init__(self, device: torch.device | None = None) -> None: ...

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, stream: "Stream") -> None: ...

    def record_event(self) -> "Stream":
        return self

    def synchronize(self) -> None: ...


def plug_in() -> None:
    """Make it the machine's accelerator."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(compute, "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    _libraries.extend((everything, aten))
    _stand_in_for_the_driver()


def _stand_in_for_the_driver() -> None:
    """What a vendor's C++ gives PyTorch and Python can't: streams, pinned memory, its size."""
    empty = torch.empty
    torch.empty = lambda *size, pin_memory=False, **options: empty(*size, **options)
    torch.Tensor.pin_memory = lambda self, device=None: self.clone()
    torch.Stream = Stream
    torch.accelerator.current_stream = Stream
    torch.accelerator.synchronize = lambda device=None: None
    torch.accelerator.set_device_index = lambda index: None
    torch.accelerator.get_memory_info = lambda device=None: (1 << 30, 1 << 30)


if __name__ == "__main__":
    plug_in()
    from pipelines.training.__main__ import main

    main(sys.argv[1:])
