"""Tensor parallelism of layers in NF4, which torch's styles don't know.

The weight is quantised whole, so that its blocks and their scales are those of one process; then
each process keeps its rows or its columns, which begin and end where blocks do.
"""

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from pipelines.models.quantization import BLOCK, NF4Linear


class QuantizedColumns(ParallelStyle):
    """As torch's `ColwiseParallel`: each process has some of the outputs, as a plain tensor."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer, rank = cast("NF4Linear", module), device_mesh.get_local_rank()
        _distribute(layer, device_mesh, Shard(0), Shard(0), self.src_data_rank)
        rows, columns = layer.out_features // device_mesh.size(), layer.in_features
        blocks = columns // BLOCK
        layer.divide(torch.Size((rows, columns)), (rank * rows * blocks, blocks))
        module.forward = partial(self._run, layer)
        return module

    def _run(self, layer: NF4Linear, x: DTensor) -> Tensor:
        """Map inputs that all processes have whole."""
        return _with_bias(layer, layer.product(x.to_local(grad_placements=[Partial()])))


class QuantizedRows(ParallelStyle):
    """As torch's `RowwiseParallel`: each process has some of the inputs, and results are added."""

    def __init__(self, outputs: Placement) -> None:
        """Take the layout of the output, which is this process's plain tensor."""
        super().__init__()
        self._outputs = outputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer, rank = cast("NF4Linear", module), device_mesh.get_local_rank()
        _distribute(layer, device_mesh, Shard(1), Replicate(), self.src_data_rank)
        rows, columns = layer.out_features, layer.in_features // device_mesh.size()
        place = rank * columns // BLOCK, layer.in_features // BLOCK
        layer.divide(torch.Size((rows, columns)), place)
        module.forward = partial(self._run, layer, device_mesh)
        return module

    def _run(self, layer: NF4Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        """Map this process's part of the inputs."""
        share = DTensor.from_local(layer.product(x), mesh, [Partial()], run_check=False)
        return _with_bias(layer, share.redistribute(mesh, [self._outputs]).to_local())


def _distribute(
    layer: NF4Linear, mesh: DeviceMesh, weight: Placement, bias: Placement, source: int | None
) -> None:
    """Divide the layer's parameters; what its scales are relative to stays whole."""
    for name, parameter in list(layer.named_parameters()):
        placement = bias if name == "bias" else weight
        part = distribute_tensor(parameter, mesh, [placement], src_data_rank=source)
        layer.register_parameter(name, nn.Parameter(part, requires_grad=False))


def _with_bias(layer: NF4Linear, out: Tensor) -> Tensor:
    if layer.bias is None:
        return out
    return out + cast("DTensor", layer.bias).to_local().to(out.dtype)
