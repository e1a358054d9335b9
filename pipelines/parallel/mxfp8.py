"""Linear layers whose products are in mxfp8: 32 numbers of a row share a scale, a power of two.

Each of the three products of a layer rounds both of its factors to e4m3 along what it sums over,
so that a weight and a gradient are rounded twice, by rows and by columns. Scales are rounded up: no
number is cut off.

Sources: OCP Microscaling Formats specification 1.0; Rouhani et al. 2023, "Microscaling Data Formats
for Deep Learning"; Mishra et al. 2025, "Recipes for Pre-training LLMs with MXFP8", section 3.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats import config
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from pipelines.parallel.division import MX_BLOCK


class MXLinear(nn.Linear):
    """A linear layer in mxfp8; the numbers of its inputs, outputs and positions are whole blocks.

    Its parameters are an `nn.Linear`'s. Results are in autocast's type.
    """

    emulated = False  # rounded as on a GPU, but multiplied in a wider type

    @classmethod
    def of(cls, layer: nn.Linear, *, emulated: bool) -> "MXLinear":
        """Return one with the parameters of a layer."""
        made = cls(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        made.weight, made.bias = layer.weight, layer.bias
        made.emulated = emulated
        return made

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Return the product with the weight, and the bias added."""
        x, weight, device = input, self.weight, input.device.type
        if torch.is_autocast_enabled(device):  # it does not reach into what torchao computes
            dtype = torch.get_autocast_dtype(device)
            x, weight = x.to(dtype), weight.to(dtype)
        if isinstance(x, DTensor) and isinstance(weight, DTensor):
            product: Tensor = self._divided(x, weight)
        else:
            product = self._product(x, weight)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def _divided(self, x: DTensor, weight: DTensor) -> DTensor:
        """The product under tensor parallelism: torch does not know where the scales belong."""
        (held,) = weight.placements
        by_columns = held == Shard(0)
        result: Placement = Shard(x.ndim - 1) if by_columns else Partial()
        gradient = [Partial()] if by_columns else None  # each process has a summand of it
        product = self._product(x.to_local(grad_placements=gradient), weight.to_local())
        return DTensor.from_local(product, x.device_mesh, [result], run_check=False)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = mx_mm.apply(
            x.contiguous(),
            weight,
            *(torch.float8_e4m3fn,) * 3,
            MX_BLOCK,
            KernelPreference.EMULATED if self.emulated else KernelPreference.AUTO,
            # Inductor fuses them. torchao's own for columns needs CUDA where it emulates, too.
            config.MXFP8Dim0CastKernelChoice.TORCH,
            config.MXFP8Dim1CastKernelChoice.TORCH,
            config.ScaleCalculationMode.RCEIL,
            False,  # the weight's gradient in mxfp8, too
        )
        return found
