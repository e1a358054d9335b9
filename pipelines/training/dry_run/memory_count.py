"""The bytes of all tensors on the device: the most at once, by what they are for.

`torch.distributed._tools.mem_tracker` counts the same, but hooks into every module, allows one
micro-batch only, and does not tell logits and gathered weights from activations.
"""

import weakref
from collections import Counter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

_ROUNDED = 512  # bytes; the allocator of CUDA gives a multiple
Part = Literal["weights", "gradients", "optimizer", "activations", "logits", "buffers"]
_INNER = ("_local_tensor", "_tensor", "_data")
_aten = torch.ops.aten


class MemoryCount:
    """Follows each storage from its first tensor to its last.

    Attributes:
        new: What a tensor is for unless it is known otherwise.
        peak: The most bytes at once since `begin`.
    """

    def __init__(self, logits: set[int]) -> None:
        """Count from now on.

        Args:
            logits: The sizes of the last dimension of what are logits.
        """
        self.new: Part = "buffers"
        self.peak = self._now = 0
        self._logits = logits
        self._numbers: dict[int, int] = {}  # of each storage that exists, by its address
        self._bytes: dict[int, int] = {}  # by number
        self._parts: dict[int, Part] = {}  # by number, also of storages that are gone
        self._ends: dict[int, weakref.ref[Any]] = {}
        self._at_peak: dict[int, int] = {}

    def begin(self) -> None:
        """Forget the peak."""
        self.peak = 0
        self._reach()

    @property
    def parts(self) -> dict[str, int]:
        """The bytes at the peak by purpose."""
        found: Counter[str] = Counter()
        for number, size in self._at_peak.items():
            found[self._parts[number]] += size
        return dict(found)

    def see(self, operator: Any, arguments: Any, named: dict[str, Any], result: Any) -> None:
        """Add what an operator made, and learn from what it is what its tensors are for."""
        for each in tree_iter(result):
            if isinstance(each, Tensor) and each.device.type == "cuda":
                self._add(each, operator, arguments)
        self._reach()
        if operator is torch.ops.fsdp.chunk_cat.default:  # what is about to be scattered
            self.name("gradients", arguments[0])
        elif operator is torch.ops.fsdp.split_with_sizes_copy.default:  # what was gathered
            self.name("weights", named["out"])

    def name(self, part: Part, tensors: Any) -> None:
        """Note what tensors are for, or were for when they still existed."""
        for each in tree_iter(tensors):
            if isinstance(each, Tensor):
                number = self._numbers.get(_storage(each)._cdata)
                if number is not None:
                    self._parts[number] = part

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage has another size: FSDP empties and fills its weights so."""
        number = self._numbers.get(storage._cdata)
        if number is not None:
            size = _rounded(storage)
            self._now += size - self._bytes[number]
            self._bytes[number] = size
            self._reach()

    def _add(self, tensor: Tensor, operator: Any, arguments: Any) -> None:
        storage = _storage(tensor)
        key = storage._cdata
        if key in self._numbers:
            return
        number = len(self._parts)
        self._numbers[key] = number
        self._bytes[number] = _rounded(storage)
        self._now += self._bytes[number]
        self._parts[number] = self._part(tensor, operator, arguments)
        self._ends[number] = weakref.ref(storage, lambda _: self._remove(key, number))

    def _part(self, tensor: Tensor, operator: Any, arguments: Any) -> Part:
        if tensor.dim() > 1 and tensor.shape[-1] in self._logits:
            return "logits"
        if operator is _aten._to_copy.default:  # autocast's copies of weights
            source = self._numbers.get(_storage(arguments[0])._cdata)
            if source is not None and self._parts[source] == "weights":
                return "weights"
        return self.new

    def _remove(self, key: int, number: int) -> None:
        self._now -= self._bytes.pop(number)
        del self._numbers[key], self._ends[number]

    def _reach(self) -> None:
        if self._now > self.peak:
            self.peak = self._now
            self._at_peak = dict(self._bytes)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """Return the memory of what a DTensor, or torchao's tensor for fp8, is made of."""
    while is_traceable_wrapper_subclass(tensor):
        # Not by `__tensor_flatten__`: that of torchao's weights waits for their scale.
        tensor = next(getattr(tensor, name) for name in _INNER if hasattr(tensor, name))
    return tensor.untyped_storage()


def _rounded(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // _ROUNDED) * _ROUNDED
