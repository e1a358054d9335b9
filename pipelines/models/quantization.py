"""NF4: a frozen matrix in 4.13 bits a number, as in QLoRA (Dettmers et al. 2023).

Each block of 64 weights, in row-major order, is divided by its largest magnitude and rounded to the
nearest of 16 quantiles of a normal distribution. The magnitudes, minus their mean, are themselves
quantised to 8 bits, 256 at a time (dynamic tree quantisation, Dettmers et al. 2022). The numbers
equal those of bitsandbytes, but are plain tensors: FSDP shards them and `torch.compile` fuses their
decoding, without a custom kernel or tensor type.
"""

# ruff: noqa: N812 (functional is F everywhere)

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipelines.models.weights import fill, is_sharded, whole

BLOCK = 64
_SCALE_BLOCK = 256
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def _dynamic_tree() -> tuple[float, ...]:
    """Return 256 values from -1 to 1, dense near 0: seven powers of ten, each cut twice as fine."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        middles = 10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*middles.tolist(), *(-middles).tolist()]
    return tuple(sorted(values))


_DYNAMIC_TREE = _dynamic_tree()


Place = tuple[int, int]  # a part's first block, and the blocks from one of its rows to the next


class NF4(NamedTuple):
    """A quantised matrix of N numbers, where N is rounded up to whole blocks of 64."""

    codes: Tensor  # [N / 2] uint8, two codes per byte, the first in the high half
    scales: Tensor  # [N / 64] uint8, one per block
    scale_maxima: Tensor  # [N / 64 / 256, rounded up] fp32
    scale_mean: Tensor  # [] fp32
    # The tables to decode codes and scales lie here, so that decoding copies nothing to the device.
    pairs: Tensor  # [256, 2] fp32
    tree: Tensor  # [256] fp32


@torch.no_grad()
def quantize(weight: Tensor) -> NF4:
    """Quantise a matrix of any shape and float type; zeros fill the last block."""
    flat = weight.detach().flatten().float()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    maxima = blocks.abs().amax(dim=1)
    # A block of zeros may have any scale; 1 avoids a division by 0.
    codes = _nearest(blocks / maxima.where(maxima > 0, 1.0).unsqueeze(1), _NF4).view(-1, 2)
    mean = maxima.mean()
    centred = F.pad(maxima - mean, (0, -len(maxima) % _SCALE_BLOCK)).view(-1, _SCALE_BLOCK)
    scale_maxima = centred.abs().amax(dim=1)
    relative = centred / scale_maxima.where(scale_maxima > 0, 1.0).unsqueeze(1)
    scales = _nearest(relative, _DYNAMIC_TREE).flatten()[: len(maxima)]
    numbers = torch.tensor(_NF4, device=flat.device)
    return NF4(
        codes=codes[:, 0] << 4 | codes[:, 1],
        scales=scales,
        scale_maxima=scale_maxima,
        scale_mean=mean,
        pairs=torch.cartesian_prod(numbers, numbers),
        tree=torch.tensor(_DYNAMIC_TREE, device=flat.device),
    )


def dequantize(
    nf4: NF4,
    shape: torch.Size,
    dtype: torch.dtype,
    place: Place = (0, 0),
    *,
    fused: bool = False,
) -> Tensor:
    """Return the decoded matrix in `dtype`, computed in fp32.

    Args:
        nf4: A matrix, or a part whose rows are whole blocks; `scale_maxima` are of the whole.
        shape: The matrix's or the part's.
        dtype: The result's.
        place: Where a part lies in the whole.
        fused: By compiled functions.
    """
    scales_of, numbers_of = _compiled() if fused else (_scales, _numbers)
    scales = scales_of(nf4, place).view(-1, 1, 1)
    values = numbers_of(nf4.codes.reshape(-1, BLOCK // 2), scales, nf4.pairs, dtype)
    return values.flatten()[: shape.numel()].view(shape)


def _scales(nf4: NF4, place: Place) -> Tensor:
    """Return the scale of each block, in lines as `nf4.scales` is."""
    first, apart = place
    lines = nf4.scales.view(-1, nf4.scales.shape[-1])
    rows, columns = (torch.arange(size, device=lines.device) for size in lines.shape)
    blocks = first + apart * rows.unsqueeze(1) + columns
    return nf4.tree[lines.int()] * nf4.scale_maxima[blocks // _SCALE_BLOCK] + nf4.scale_mean


def _numbers(codes: Tensor, scales: Tensor, pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of each block, [blocks, 32, 2]."""
    return (pairs[codes.int()] * scales).to(dtype)


def _nearest(values: Tensor, table: tuple[float, ...]) -> Tensor:
    """Return the index of each value's nearest entry in an ascending table; ties go lower."""
    sorted_table = torch.tensor(table, device=values.device)
    middles = (sorted_table[:-1] + sorted_table[1:]) / 2
    return torch.bucketize(values, middles, out_int32=True).to(torch.uint8)


@cache
def _compiled() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Compile both halves only when first used: `torch.compile` takes 4 seconds to import.

    As one function, each number would need a dozen divisions by sizes that only the run knows, to
    find its block's scale: a CPU took 50 times as long. Of the second half only the number of
    blocks changes.
    """
    return torch.compile(_scales, dynamic=True), torch.compile(_numbers)


@torch.library.custom_op("penstock::nf4_product", mutates_args=())
def _product(
    x: Tensor, nf4: list[Tensor], shape: list[int], place: list[int], fused: bool, turned: bool
) -> Tensor:
    """x · Wᵀ, or x · W if turned, with W decoded to the type of x.

    The compiler can't look into this operator. Otherwise it would decode once, and keep the weight
    until the backward pass.
    """
    # Detach, as for parameters the compiler would make code for each shape and soon give up.
    plain = NF4(*(each.detach() for each in nf4))
    with torch.no_grad():
        where = place[0], place[1]
        weight = dequantize(plain, torch.Size(shape), x.dtype, where, fused=fused)
        return x @ (weight if turned else weight.t())


@_product.register_fake
def _(
    x: Tensor,
    nf4: list[Tensor],  # noqa: ARG001
    shape: list[int],
    place: list[int],  # noqa: ARG001
    fused: bool,  # noqa: ARG001
    turned: bool,
) -> Tensor:
    weight = x.new_empty(shape)  # a dry run counts it
    return x @ (weight if turned else weight.t())


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    _, nf4, *ctx.how = inputs
    ctx.save_for_backward(*nf4)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Decode W again, so that autograd keeps only the 4-bit codes; no gradient flows to them."""
    nf4, (shape, place, fused, turned) = list(ctx.saved_tensors), ctx.how
    of_x = _product(gradient, nf4, shape, place, fused, not turned)
    return of_x, [None] * len(nf4), None, None, None, None


_product.register_autograd(_gradients, setup_context=_remember)


class NF4Linear(nn.Module):
    """A linear layer whose weight is frozen in NF4; no gradient flows to it.

    Codes and scales are parameters, so that FSDP shards them; the rest is 0.1% of their size. They
    have the weight's rows if these are whole blocks, so that tensor parallelism can divide them.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Quantise a layer; on the meta device, only set up the shapes of its tensors."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype  # the type of the decoded weight
        self.divide(self.shape, (0, self.in_features // BLOCK))
        self.codes: Tensor
        for name, tensor in self._in_rows(quantize(linear.weight))._asdict().items():
            if name in ("codes", "scales"):
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor)
        self.bias = linear.bias

    @property
    def nf4(self) -> NF4:
        """The quantised weight."""
        return NF4(*(getattr(self, name) for name in NF4._fields))

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""
        return torch.Size((self.out_features, self.in_features))

    @property
    def device(self) -> torch.device:
        """The device that holds the weight."""
        return self.codes.device

    @torch.no_grad()
    def fill(self, weight: Tensor) -> None:
        """Quantise and copy in a matrix [out, in]; a sharded layer keeps this process's part."""
        for ours, new in zip(self.nf4, self._in_rows(quantize(weight)), strict=True):
            fill(ours, new)

    def whole(self) -> Tensor:
        """Return the decoded weight [out, in], gathered first if it is sharded."""
        nf4, place = NF4(*map(whole, self.nf4)), (0, self.in_features // BLOCK)
        return dequantize(nf4, self.shape, self.dtype, place)

    def divide(self, part: torch.Size, place: Place) -> None:
        """Note the shape and the place of the part of the weight that this process computes with.

        Codes and scales must then be DTensors.
        """
        self._part, self._place = part, place

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out], in autocast's type if autocast is on."""
        out = self.product(x)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out] without the bias; of a divided layer with its own part."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        nf4 = [each.to_local() if is_sharded(each) else each for each in self.nf4]
        fused = torch.compiler.is_compiling()
        out: Tensor = _product(x, nf4, self._part, self._place, fused, False)
        return out

    def _in_rows(self, nf4: NF4) -> NF4:
        if self.in_features % BLOCK:
            return nf4
        codes, scales = (each.view(self.out_features, -1) for each in (nf4.codes, nf4.scales))
        return nf4._replace(codes=codes, scales=scales)
