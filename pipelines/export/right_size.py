"""The choice of the variant to serve: the best that fits the memory and loses little enough.

The choice uses only measured numbers, which `variants.py` measures. A quantised variant is judged
by its own score, never by that of the model it was made from.

The module also draws the variants' bits per byte over memory and over loading time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.planning.memory import HEADROOM
from pipelines.planning.serving_plan import ServingMemory, serving_memory

GB = 10**9  # as memory is sold


@dataclass(frozen=True)
class Variant:
    """One form of a model that was written and measured."""

    name: str  # bf16, int8, int4
    weight_bytes: int
    bits_per_byte: float
    load_seconds: float


@dataclass(frozen=True)
class Budget:
    """The limits on the cost of serving.

    Attributes:
        gb: The device's memory in 10^9 bytes; a tenth of it is reserved for the engine.
        max_loss: The most bits per byte that a variant may need above the registered model.
        sequences: The number of sequences answered at once.
        tokens: The tokens of each sequence, prompt and answer.
    """

    gb: float
    max_loss: float
    sequences: int
    tokens: int


@dataclass(frozen=True)
class AssessedVariant:
    """A variant that was compared with a budget."""

    variant: Variant
    memory: ServingMemory
    lost: float  # bits per byte, against the registered model
    fits: bool
    good: bool  # within the allowed loss

    def __str__(self) -> str:
        need = f"{self.variant.name} needs {self.memory.total / GB:.3g} GB"
        return f"{need} and loses {self.lost:+.4f}"


def assess_variants(
    variants: Sequence[Variant], config: DecoderConfig, registered: float, budget: Budget
) -> list[AssessedVariant]:
    """Return each variant's memory and loss, in the given order.

    Args:
        variants: Variants measured on the same documents as the registered model.
        config: The model's shape.
        registered: The registered model's bits per byte.
        budget: The limits on the cost of serving.
    """
    judged = []
    for each in variants:
        memory = serving_memory(config, each.weight_bytes, budget.sequences, budget.tokens)
        lost = each.bits_per_byte - registered
        judged.append(
            AssessedVariant(
                variant=each,
                memory=memory,
                lost=lost,
                fits=memory.total <= budget.gb * GB * HEADROOM,
                good=lost <= budget.max_loss,  # false for nan too
            )
        )
    return judged


def choose(judged: Sequence[AssessedVariant], budget: Budget) -> AssessedVariant:
    """Return the allowed variant with the fewest bits per byte; among equals, the smallest.

    Raises:
        UserError: No variant is allowed; the message has each variant's numbers.
    """
    allowed = [each for each in judged if each.fits and each.good]
    if not allowed:
        numbers = "; ".join(map(str, judged))
        raise UserError(
            f"no variant fits {budget.gb:g} GB within a loss of {budget.max_loss:g} bits per byte "
            f"at {budget.sequences} x {budget.tokens} tokens: {numbers}; allow more memory "
            f"({1 - HEADROOM:.0%} is reserved for the engine), fewer tokens or more loss"
        )
    return min(allowed, key=lambda each: (each.variant.bits_per_byte, each.memory.total))


_INK, _GOOD, _BAD = "#808080", "#2a9d8f", "#d1495b"  # visible on light and dark pages


def draw_right_size(judged: Sequence[AssessedVariant], budget: Budget, path: Path) -> None:
    """Draw bits per byte over serving memory and over load time, as a PNG.

    Variants that fit the budget and lose little enough are green; a line shows the budget.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    memory, loading = figure.subplots(1, 2, sharey=True)
    for each in judged:
        colour = _GOOD if each.fits and each.good else _BAD
        for axes, x in (
            (memory, each.memory.total / GB),
            (loading, each.variant.load_seconds),
        ):
            axes.plot(x, each.variant.bits_per_byte, "o", color=colour)
            axes.annotate(
                each.variant.name,
                (x, each.variant.bits_per_byte),
                (6, 4),
                textcoords="offset points",
                color=_INK,
            )
    memory.axvline(budget.gb * HEADROOM, color=_INK, linestyle="--", linewidth=1)
    memory.set_xlabel(f"GB to serve {budget.sequences} x {budget.tokens:,} tokens", color=_INK)
    memory.set_ylabel("bits per byte", color=_INK)
    loading.set_xlabel("seconds to load", color=_INK)
    for axes in (memory, loading):
        axes.set_xlim(left=0)
        axes.margins(0.15)
        axes.tick_params(colors=_INK)
        axes.grid(color=_INK, alpha=0.25)
        axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, transparent=True)
