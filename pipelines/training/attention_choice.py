"""What attends within packed documents and windows on GPUs: found out once, before the first step.

There are two choices, and each is made by a small attention on each process's own device, whose
result and gradients are compared with exact ones:

- `varlen_attn` instead of FlexAttention.
- For it, FlashAttention 3 instead of FlashAttention 2: on Hopper, where the module
  `flash_attn_interface` is installed.

What one process can't do, none does. What a run began with it keeps if it still can, as another
kernel rounds otherwise. Attention to all earlier tokens is left to torch.

Papers: FlashAttention 2 (Dao 2023) and 3 (Shah et al. 2024).
"""

import logging
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from pipelines.core.errors import SharedError, one_line
from pipelines.loading.dataloader import Loader
from pipelines.models.attention import Mask, attend, attention_mask, sequences
from pipelines.models.config import DecoderConfig
from pipelines.models.weights import COMPUTE_DTYPES
from pipelines.parallel.parallelize import keep_compiled
from pipelines.parallel.process_group import from_all, rank
from pipelines.planning.attention_rule import (
    FLASH_CAPABILITY,
    is_divided,
    why_not_by_itself,
    why_not_flash,
)
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.training_section import AttentionKernel

FLASH_3 = "FA3"
_MODULE = "flash_attn_interface"  # that of FlashAttention 3, which torch imports by this name
_HOPPER = 9  # the first number of the compute capability
_CPU = torch.device("cpu")

_log = logging.getLogger(__name__)


class Kernels(NamedTuple):
    """What attends within documents and windows.

    Attributes:
        attention: As in the recipe, but never `auto`.
        flash: The FlashAttention that `varlen_attn` calls instead of torch's own; None if that.
    """

    attention: AttentionKernel
    flash: str | None = None


def choose_kernels(
    recipe: Recipe,
    config: DecoderConfig,
    loader: Loader,
    device: torch.device,
    before: Kernels | None,
) -> Kernels:
    """Choose what attends within documents and windows; all processes call this.

    Args:
        recipe: Its precision is settled.
        config: The model's shape.
        loader: Knows the documents.
        device: This process's.
        before: What the run began with; None if it begins now.

    Raises:
        SharedError: the recipe wants `varlen_attn`, but some process can't have it.
    """
    _restore_flash_2()  # an earlier run in this process may have called another
    asked = recipe.train.attention
    dtype = COMPUTE_DTYPES.get(recipe.train.fixed_precision)
    if device.type != "cuda" or dtype is None or not is_divided(recipe, config):
        return Kernels("flex" if asked == "auto" else asked)
    draw = partial(_Problem.drawn, config, dtype, device, config.sliding_window)
    chosen, why = _attention(recipe, config, loader, device, draw, before)
    _say(f"train.attention: {asked} is {chosen}: {why}")
    if chosen == "flex" or (before is not None and before.flash != FLASH_3):
        return Kernels(chosen)
    return Kernels(chosen, FLASH_3 if _calls_flash_3(recipe, device, draw) else None)


def _attention(
    recipe: Recipe,
    config: DecoderConfig,
    loader: Loader,
    device: torch.device,
    draw: Callable[[], "_Problem"],
    before: Kernels | None,
) -> tuple[AttentionKernel, str]:
    """Return what attends within documents and windows, and why."""
    asked, precision = recipe.train.attention, recipe.train.fixed_precision
    if asked == "flex":
        return asked, "the recipe says so"
    if asked == "auto" and before is not None and before.attention == "flex":
        return before.attention, "the run began with it"

    def why_not() -> str | None:
        why = why_not_flash(config, precision) or _why_not_on(device)
        if why or before is not None:
            return why
        if asked == "auto":
            why = why_not_by_itself(recipe, loader.most_documents) or _why_slow_on(device)
        if why:
            return why
        return _why_it_differs(draw())

    why = _first_reason(why_not)
    if why is None and before is not None:
        return "varlen", "the run began with it"
    if why is None:
        return "varlen", "the check on each GPU gives FlexAttention's result, within rounding"
    if asked == "varlen":
        raise SharedError(f"train.attention = varlen: {why}; set flex or auto")
    return "flex", why


def _first_reason(find: Callable[[], str | None]) -> str | None:
    """Return the reason of the first process that finds one; all processes call this."""
    try:
        mine = find()
    except Exception as error:  # kernels and packages raise what they like where they don't run
        mine = f"{type(error).__name__}: {one_line(error)}"
    return next(filter(None, from_all(mine)), None)


def _why_not_on(device: torch.device) -> str | None:
    """Return why FlashAttention does not run on a device, or None."""
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        return f"{name} is no NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < FLASH_CAPABILITY:
        return f"{name} is older than FlashAttention supports"
    return None


def _why_slow_on(device: torch.device) -> str | None:
    """Return why FlexAttention is faster on a device, as measured on one H200, or None."""
    if torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return None
    without = _why_no_flash_3(device, deterministic=False)
    why = "on Hopper FlashAttention 2 is slower, and FlashAttention 3 is not used"
    return without and f"{why}: {without}"


def _calls_flash_3(recipe: Recipe, device: torch.device, draw: Callable[[], "_Problem"]) -> bool:
    """Let `varlen_attn` call FlashAttention 3, and return whether all processes can."""

    def why_not() -> str | None:
        why = _why_no_flash_3(device, deterministic=recipe.train.deterministic)
        return why or _activated(draw())

    why = _first_reason(why_not)
    if why is None:
        _say("varlen_attn calls FlashAttention 3: the check on each GPU gives the right result")
    else:
        _restore_flash_2()
        _say(f"FlashAttention 3 is not used, and torch's own FlashAttention 2 stays: {why}")
    return why is None


def _restore_flash_2() -> None:
    """Let torch call its own FlashAttention, if it does not."""
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def _why_no_flash_3(device: torch.device, *, deterministic: bool) -> str | None:
    """Return why a process can't call FlashAttention 3, or None if it may try."""
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return f"it is for Hopper GPUs only, and {name} is none"
    if find_spec(_MODULE) is None:
        return f"its package is not installed: there is no module {_MODULE}"
    if deterministic:
        return "train.deterministic is set, which it does not support for all models"
    return None


def _activated(problem: "_Problem") -> str | None:
    """Let this process call FlashAttention 3, and return why its result is wrong, or None."""
    expected = problem.packed()
    activate_flash_attention_impl(FLASH_3)
    return _difference(problem.packed(), expected, problem.exact(), problem.epsilon)


def _why_it_differs(problem: "_Problem") -> str | None:
    """Return why `varlen_attn` does not do what FlexAttention does, or None if it does."""
    keep_compiled()
    documents, window = problem.documents_BS, problem.window
    try:
        found = problem.packed()
        mask = attention_mask(documents, documents.shape[1], window, documents.device)
        return _difference(found, problem.computed(mask), problem.exact(), problem.epsilon)
    finally:
        # Else blocks would be compiled for sizes that change, as these were others.
        torch.compiler.reset()


class _Problem(NamedTuple):
    """A small attention.

    Attributes:
        operands: Queries, keys and values.
        gradient_BNSH: That of the result.
        documents_BS: The number of each token's document.
        window: How many positions a token sees; None means all.
    """

    operands: tuple[Tensor, ...]
    gradient_BNSH: Tensor  # noqa: N815
    documents_BS: Tensor  # noqa: N815
    window: int | None

    @classmethod
    def drawn(
        cls, config: DecoderConfig, dtype: torch.dtype, device: torch.device, window: int | None
    ) -> "_Problem":
        """Draw one with two of the model's groups of heads, the same on each device."""
        generator = torch.Generator().manual_seed(0)
        lengths = torch.tensor([[1, 100, 129, 154], [200, 184, 0, 0]])
        documents = torch.stack([torch.arange(4).repeat_interleave(row) for row in lengths])
        batch, length = documents.shape

        def draw(heads: int) -> Tensor:
            shape = (batch, length, heads, config.head_width)
            numbers = torch.randn(shape, generator=generator)
            return numbers.transpose(1, 2).to(device, dtype)

        group = 2 * config.heads // config.kv_heads
        if window is not None:
            window = min(window, 100)
        operands = draw(group), draw(2), draw(2)
        return cls(operands, draw(group), documents.to(device, torch.int32), window)

    @property
    def epsilon(self) -> float:
        """The rounding of its type."""
        return torch.finfo(self.gradient_BNSH.dtype).eps

    def computed(self, mask: Mask) -> list[Tensor]:
        """Return the result and the gradients of queries, keys and values, in fp32 on the CPU."""
        leaves = q, k, v = [x.detach().requires_grad_() for x in self.operands]
        out = attend(q, k, v, mask)
        gradients = torch.autograd.grad(out, leaves, self.gradient_BNSH)
        return [x.detach().float().cpu() for x in (out, *gradients)]

    def packed(self) -> list[Tensor]:
        """Return the same by `varlen_attn`."""
        documents, (batch, length) = self.documents_BS, self.documents_BS.shape
        most, device = int(documents.max()) + 3, documents.device  # so that some are empty
        return self.computed(sequences(documents, (batch, length), self.window, most, device))

    def exact(self) -> list[Tensor]:
        """Return the same without rounding to the type."""
        operands = tuple(x.cpu().float() for x in self.operands)
        there = self._replace(operands=operands, gradient_BNSH=self.gradient_BNSH.cpu().float())
        length = operands[0].shape[2]
        return there.computed(attention_mask(self.documents_BS.cpu(), length, self.window, _CPU))


def _difference(
    found: list[Tensor], other: list[Tensor], exact: list[Tensor], epsilon: float
) -> str | None:
    """Return what is wrong with a result; None if it is about as exact as another kernel's."""
    names = ("result", "queries' gradient", "keys' gradient", "values' gradient")
    for name, mine, theirs, right in zip(names, found, other, exact, strict=True):
        size = right.abs().max()
        error, allowed = ((x - right).abs().max() / size for x in (mine, theirs))
        if not error <= 2 * allowed + epsilon:  # so that what is no number is wrong too
            return (
                f"in the check on this GPU its {name} is off by {error:.2g} of the largest number, "
                f"and the other kernel's by {allowed:.2g}"
            )
    return None


def _say(line: str) -> None:
    if rank() == 0:
        _log.info("%s", line)
