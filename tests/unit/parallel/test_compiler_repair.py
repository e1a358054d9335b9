from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.codegen.common import DeferredLine
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.utils import IndentedBuffer
from torch.compiler import config

from pipelines.parallel.compiler_repair import repair_compiler


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("load", "get_load_buffer"):
        monkeypatch.setattr(TritonKernel, name, getattr(TritonKernel, name))
    with config.patch(cache_key_tag=""):
        yield


@pytest.mark.parametrize(("name", "barriers"), [("stored", 1), ("given", 0)])
def test_what_a_kernel_stored_it_reads_after_a_barrier(
    name: str, barriers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: TritonKernel, _name: str, _index: object) -> None:
        indexing = SimpleNamespace(has_indirect=lambda: False, has_tmpmask=lambda: False)
        self.get_load_buffer(indexing).writeline("read")

    monkeypatch.setattr(TritonKernel, "load", load)
    repair_compiler()
    repair_compiler()  # once is enough
    kernel = TritonKernel.__new__(TritonKernel)
    kernel.inside_reduction, kernel.loads = False, IndentedBuffer()
    kernel.cse = SimpleNamespace(invalidated_stores={"stored"})
    kernel.load(name, None)
    *before, last = kernel.loads._lines
    assert last == "read"
    assert [each.line for each in before if isinstance(each, DeferredLine)] == (
        ["tl.debug_barrier()"] * barriers
    )
    assert config.cache_key_tag


def test_torch_still_needs_the_repair() -> None:
    assert torch.__version__ < "2.14", "delete pipelines/parallel/compiler_repair.py"
