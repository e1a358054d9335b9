"""CUDA devices that don't exist: with `FakeTensorMode`, torch works on them without computing.

A build of torch for CPUs has no CUDA, so that this module registers, by ctypes, what torch asks: a
device guard, and hooks that say there is CUDA. Streams, events and the devices' properties, which
`torch.cuda` asks its driver for, are replaced by objects that do nothing or that tell the table.

Only torch's own structures of one version are known here, and only for a process that ends after.
"""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch

from pipelines.core.errors import UserError
from pipelines.planning.hardware import Hardware
from pipelines.training.dry_run.wait_log import WaitLog

TORCH = "2.13"
DEVICE = torch.device("cuda", 0)
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # an array of guards by device type
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"  # returns the object that torch asks about CUDA
_CUDA = 1  # the number of the device type
# The methods of `AcceleratorHooksInterface` by their number in its table.
_TRUE = (2, 3, 6, 16)  # isBuilt, isAvailable, deviceCount, hasCUDA
_ZERO = (4, 5, 7, 8, 9, 10)  # contexts, and the number of the current device
_BEFORE = 2  # entries of a C++ table of methods that come before its first method
_kept: list[Any] = []  # torch calls them as long as the process lives


def pretend_cuda() -> None:
    """Make torch believe that it has CUDA, for the rest of this process.

    Raises:
        UserError: this version of torch is another than the known one.
    """
    known = torch.__version__.startswith(f"{TORCH}.")
    if known and torch.version.cuda is None:
        _register_guard()
        _replace_hooks()
    if not known or torch._C._accelerator_getAccelerator() != torch.device("cuda"):
        raise UserError(
            f"plan --dry-run: it needs torch {TORCH} for Linux, but this is torch "
            f"{torch.__version__}; install that version, or leave the option out"
        )


def _function(answer: int) -> int:
    """Return the address of a C function that returns `answer`."""
    function = ctypes.CFUNCTYPE(ctypes.c_long)(lambda: answer)
    _kept.append(function)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _register_guard() -> None:
    """Register a guard that says there are no devices; torch then puts in one that does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    methods = (ctypes.c_void_p * 64)(*[_function(0)] * 64)
    guard = (ctypes.c_void_p * 2)(ctypes.addressof(methods), 0)
    _kept.extend((methods, guard))
    registered = (ctypes.c_void_p * 32).in_dll(library, _GUARDS)
    registered[_CUDA] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()


def _replace_hooks() -> None:
    """Give the hooks a table of methods that say there is one device."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    get = getattr(library, _HOOKS)
    get.restype = ctypes.c_void_p
    table_of_hooks = ctypes.c_void_p.from_address(get())
    begin = (table_of_hooks.value or 0) - _BEFORE * ctypes.sizeof(ctypes.c_void_p)
    table = (ctypes.c_void_p * 80)(*(ctypes.c_void_p * 80).from_address(begin))
    _kept.append(table)
    for numbers, answer in ((_TRUE, 1), (_ZERO, 0)):
        for number in numbers:
            table[_BEFORE + number] = _function(answer)
    table_of_hooks.value = ctypes.addressof(table) + _BEFORE * ctypes.sizeof(ctypes.c_void_p)


class _Fake:
    """A stream, an event, or the context of one: all that they wait for is done at once."""

    device = DEVICE
    device_type, device_index, stream_id = _CUDA, 0, 0
    waits: WaitLog

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Fake)

    def __hash__(self) -> int:
        return _CUDA

    def wait(self, *_: Any) -> None:
        """Wait on the device, not on the host."""

    record = wait_stream = wait_event = wait

    def record_event(self, event: Any = None) -> Any:
        """Return an event."""
        return event or _Event()

    def query(self) -> bool:
        """Tell that all is done."""
        return True

    def is_capturing(self) -> bool:
        """Tell that no graph of CUDA is recorded."""
        return False

    def synchronize(self) -> None:
        """Note that the host waits."""
        self.waits.note("a stream or an event is waited for")


# torch's compiler wants a class of its own for each of torch's.
_Stream, _Event, _CudaStream, _CudaEvent = (type(f"_Fake{n}", (_Fake,), {}) for n in range(4))


@contextmanager
def fake_devices(hardware: Hardware, waits: WaitLog) -> Iterator[None]:
    """Replace what asks the driver by what the table tells of `hardware`, within the block.

    Args:
        hardware: The device; it has a compute capability.
        waits: Is told of each wait of the host for a device.
    """
    _Fake.waits = waits
    torch.utils._device._device_constructors()  # remembers `torch.empty` before it is replaced
    with ExitStack() as stack:
        for owner, values in _replacements(hardware, waits):
            for name, value in values.items():
                stack.enter_context(patch.object(owner, name, value))
        yield


def _replacements(hardware: Hardware, waits: WaitLog) -> list[tuple[Any, dict[str, Any]]]:
    memory = hardware.memory_bytes
    return [
        (torch, {"Stream": _Stream, "Event": _Event, "empty": _never_pinned(torch.empty)}),
        (torch.Tensor, {"pin_memory": lambda self, *_: self, "is_pinned": lambda *_: True}),
        (torch.cuda, _of_cuda(hardware) | {"synchronize": _note(waits)}),
        (torch.cuda.amp.common, {"amp_definitely_not_available": lambda: False}),
        (
            torch.accelerator,
            {
                "current_accelerator": lambda *_, **__: torch.device("cuda"),
                "is_available": lambda: True,
                "current_stream": _Stream,
                "synchronize": _note(waits),
                "device_count": lambda: hardware.devices_per_node,
                "set_device_index": lambda *_: None,
                "current_device_index": lambda: 0,
                "get_memory_info": lambda *_: (memory, memory),
            },
        ),
    ]


def _of_cuda(hardware: Hardware) -> dict[str, Any]:
    properties = SimpleNamespace(
        name=hardware.driver_name or hardware.name,
        major=(hardware.capability or (0, 0))[0],
        minor=(hardware.capability or (0, 0))[1],
        total_memory=hardware.memory_bytes,
        # No kernel is compiled for them, but torch's compiler asks.
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65_536,
        gcnArchName="",
    )
    return {
        "Stream": _CudaStream,
        "Event": _CudaEvent,
        "stream": _CudaStream,
        "device": _CudaStream,
        "current_stream": _CudaStream,
        "default_stream": _CudaStream,
        "set_stream": lambda *_: None,
        "set_device": lambda *_: None,
        "current_device": lambda: 0,
        "device_count": lambda: hardware.devices_per_node,
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: hardware.capability,
        "get_device_properties": lambda *_: properties,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *_, **__: True,
        "max_memory_allocated": lambda *_: 0,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "manual_seed_all": lambda *_: None,
        "default_generators": tuple(torch.Generator() for _ in range(hardware.devices_per_node)),
        "_is_in_bad_fork": lambda: False,
    }


def _note(waits: WaitLog) -> Any:
    def synchronize(*_: Any) -> None:
        waits.note("the device is waited for")

    return synchronize


def _never_pinned(empty: Any) -> Any:
    def made(*arguments: Any, pin_memory: bool = False, **named: Any) -> Any:  # noqa: ARG001
        return empty(*arguments, **named)

    return made
