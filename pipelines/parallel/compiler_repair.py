"""A mistake of torch's compiler for GPUs, repaired until the product has a torch without it.

A reduction over long rows may store numbers in one loop and read them in the next. torch before
2.14 puts no barrier between, so that a warp can read what another has not yet written: in bf16,
gradients of a mixture as wide as 256 became 27 times too large (decision 0028). torch 2.14 has the
same repair (pytorch/pytorch#190519).
"""

from typing import Any

import torch
from torch.compiler import config

_REPAIRED_IN = (2, 14)
_TAG = "penstock-barrier"


def repair_compiler() -> None:
    """Have kernels wait for what they stored before they read it; call it before any compiles."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version >= _REPAIRED_IN or config.cache_key_tag == _TAG:
        return
    from torch._inductor.codegen.common import DeferredLine  # takes seconds
    from torch._inductor.codegen.triton import TritonKernel

    kernel: Any = TritonKernel
    load, buffer_of = kernel.load, kernel.get_load_buffer

    def load_after_barrier(self: Any, name: str, index: Any) -> Any:
        self.read_back = name if name in self.cse.invalidated_stores else None
        try:
            return load(self, name, index)
        finally:
            self.read_back = None

    def buffer_with_barrier(self: Any, indexing: Any) -> Any:
        lines = buffer_of(self, indexing)
        if getattr(self, "read_back", None) is not None:
            lines.writeline(DeferredLine(self.read_back, "tl.debug_barrier()"))
        return lines

    kernel.load, kernel.get_load_buffer = load_after_barrier, buffer_with_barrier
    # What was compiled before the repair lies in a cache, which does not know of it.
    config.cache_key_tag = _TAG
