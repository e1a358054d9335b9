"""Exchanges of tensor parallelism that overlap with the matrix products beside them.

torch's compiler replaces a gather and the products that read it, and a product and the scatter of
its sum, by one operator: it computes with a part while the next one travels over NVLink, through
memory that the GPUs of a host share (symmetric memory). Of a block's eight exchanges it replaces
six. In the backward pass two products or three are added before they are scattered; such a sum
stays an exchange of its own, as does what `selective` checkpointing gathers again.

Papers: Wang et al. 2023 (overlapping decomposed collectives with products); torch's pass is
`torch/_inductor/fx_passes/micro_pipeline_tp.py`.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import statically_known_true

from pipelines.core.errors import UserError

_aten, _c10d, _symmetric = torch.ops.aten, torch.ops._c10d_functional, torch.ops.symm_mem
_APART = (_c10d.all_gather_into_tensor.default, _c10d.reduce_scatter_tensor.default)
_OVERLAPPED = (
    _symmetric.fused_all_gather_matmul.default,
    _symmetric.fused_matmul_reduce_scatter.default,
)
_COUNTER = "penstock_exchanges"


class Exchanges(NamedTuple):
    """Gathers and scatters in the compiled graphs of this process's blocks.

    Attributes:
        overlapped: Those that became one operator with their products.
        apart: The others.
    """

    overlapped: int
    apart: int

    @classmethod
    def compiled(cls) -> "Exchanges":
        """Return those of all graphs since `compiler_options`, also of graphs out of a cache."""
        found = counters["inductor"]
        return cls(*(found[f"{_COUNTER}_{name}"] for name in cls._fields))

    def check(self) -> str:
        """Return a line for the log.

        Raises:
            UserError: nothing overlaps.
        """
        number = sum(self)
        if not self.overlapped:
            raise UserError(
                f"parallel.async_tp: torch's compiler overlaps none of the {number} exchanges in "
                "this model's blocks; set parallel.async_tp = false"
            )
        return (
            f"parallel.async_tp: {self.overlapped} of {number} exchanges in compiled blocks "
            "overlap with matrix products"
        )


class _Pass(CustomGraphPass):
    def uuid(self) -> Any:
        """Return what changes with this file: a compiled graph is kept for as long as it stays."""
        return get_hash_for_files((__file__,))


class _JoinViews(_Pass):
    """Removes views that undo each other between a gather and its product.

    torch's own pass keeps them where several products read the first one.
    """

    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=_aten.reshape.default):
            view = node.args[0]
            if view.target is not _aten.reshape.default:
                continue
            source = view.args[0]
            if _same_shape(source.meta["val"].shape, node.meta["val"].shape):
                node.replace_all_uses_with(source)
                graph.erase_node(node)


class _CountExchanges(_Pass):
    """Counts what torch's pass left and what it replaced.

    torch keeps the compiler's counts with the graph, and adds them where it takes that from its
    cache.
    """

    def __call__(self, graph: Graph) -> None:
        found = counters["inductor"]
        for node in graph.nodes:
            found[f"{_COUNTER}_apart"] += node.target in _APART
            found[f"{_COUNTER}_overlapped"] += node.target in _OVERLAPPED


def _same_shape(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return len(ours) == len(theirs) and all(
        statically_known_true(a == b) for a, b in zip(ours, theirs, strict=True)
    )


# One of each, as torch compiles anew for options that are not equal.
_JOIN_VIEWS, _COUNT_EXCHANGES = _JoinViews(), _CountExchanges()


def compiler_options(mesh: DeviceMesh) -> dict[str, Any]:
    """Return the options with which `torch.compile` overlaps the exchanges of a mesh's processes.

    Args:
        mesh: Tensor parallel, with one dimension.
    """
    with warnings.catch_warnings():
        # torch 2.13 says that this is no longer needed, but its pass leaves other groups alone.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)
    for name in Exchanges._fields:  # an earlier run in this process may have counted
        counters["inductor"].pop(f"{_COUNTER}_{name}", None)
    return {
        "_micro_pipeline_tp": True,
        "post_grad_custom_pre_pass": _JOIN_VIEWS,
        "post_grad_custom_post_pass": _COUNT_EXCHANGES,
    }
