"""A rank's dry run whose blocks go through Inductor's passes, up to the kernels for a GPU.

It prints what became of tensor parallelism's exchanges: for each graph whether it is a backward
pass's, and how many exchanges overlap and how many don't.
"""

import json
import os
import sys
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    compile_fx,
    fake_tensor_prop,
    view_to_reshape,
)
from torch._inductor.virtualized import V

from pipelines.parallel.async_tensor_parallel import Exchanges
from pipelines.training.dry_run import fake_kernels
from pipelines.training.dry_run.dry_run import Case
from pipelines.training.dry_run.one_rank import run_rank

found: list[tuple[bool, int, int]] = []


def passes(graph: Any, inputs: Any, *, is_backward: bool = False, **_: Any) -> Any:
    """As `codegen_and_compile` of torch does, but it ends before kernels are made."""
    view_to_reshape(graph)
    with torch.no_grad():
        mode = fake_tensor_prop(graph, inputs)
    before = Exchanges.compiled()
    with V.set_fake_mode(mode):
        _recursive_post_grad_passes(graph, is_inference=False)
    now = Exchanges.compiled()
    found.append((is_backward, now.overlapped - before.overlapped, now.apart - before.apart))
    graph.recompile()
    return make_boxed_func(graph.forward)  # its operators run on fake tensors


def backend(graph: Any, inputs: Any, options: dict[str, Any]) -> Any:
    with config.patch(options):
        return compile_fx(graph, inputs, inner_compile=config.patch(options)(passes))


def compile_blocks(real: Any, part: Any, options: Any) -> None:
    real(part, backend=backend, options=options)


if __name__ == "__main__":
    case = Case.from_json(sys.stdin.read())
    with (
        patch.object(fake_kernels, "_compile", compile_blocks),
        patch.object(dist, "is_nccl_available", lambda: True),  # as in a build for GPUs
        config.patch(joint_graph_constant_folding=False),  # it would compute on the device
    ):
        run_rank(case, 0)
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)
