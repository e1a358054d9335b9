"""The rule behind `train.precision: auto` and `train.compile: auto`; no torch here.

A GPU that has bf16 trains in bf16 with compiled blocks. Any other device trains in fp32, and
nothing is compiled:

- On a CPU, a run is usually too short to earn back the time of compiling.
- fp16, which older GPUs have, ends at 65,504; activations of models from bf16 can be larger. So
  fp16 with its loss scaling is the user's choice.
- Triton, with which torch compiles for GPUs, supports those of compute capability 8.0 and later,
  and they have bf16.
"""

from typing import NamedTuple, Self

from pipelines.planning.hardware import Hardware
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import override_values
from pipelines.recipe.training_section import Precision

PRECISION = "train.precision"
COMPILE = "train.compile"


class Device(NamedTuple):
    """The properties of a device that the rule needs."""

    is_cpu: bool
    has_bf16: bool  # in hardware, not emulated

    @classmethod
    def of(cls, hardware: Hardware) -> Self:
        """Return the properties of the device with this datasheet."""
        return cls(hardware.is_cpu, "bf16" in hardware.flops)

    @property
    def trains_in_bf16(self) -> bool:
        """Whether `auto` is bf16 on this device."""
        return self.has_bf16 and not self.is_cpu

    def __str__(self) -> str:
        if self.is_cpu:
            return "a CPU"
        return "a GPU with bf16" if self.has_bf16 else "a GPU without bf16"


def is_settled(recipe: Recipe) -> bool:
    """Return whether neither the precision nor compiling is `auto`."""
    return "auto" not in (recipe.train.precision, recipe.train.compile)


def settle_precision(recipe: Recipe, device: Device) -> Recipe:
    """Return the recipe with a value in place of each `auto` of the two; other values stay."""
    if is_settled(recipe):
        return recipe
    values = {PRECISION: _precision(recipe, device), COMPILE: _compile(recipe, device)[0]}
    return override_values(recipe, values)


def reasons(recipe: Recipe, device: Device) -> list[str]:
    """Return a line for each `auto` of the two: its value on this device, and why."""
    lines = []
    if recipe.train.precision == "auto":
        lines.append(f"{PRECISION}: auto is {_precision(recipe, device)} on {device}")
    if recipe.train.compile == "auto":
        compiled, why = _compile(recipe, device)
        lines.append(f"{COMPILE}: auto is {str(compiled).lower()} {why}")
    return lines


def _precision(recipe: Recipe, device: Device) -> Precision:
    if recipe.train.precision != "auto":
        return recipe.train.precision
    return "bf16" if device.trains_in_bf16 else "fp32"


def _compile(recipe: Recipe, device: Device) -> tuple[bool, str]:
    """Return whether blocks are compiled, and where or why."""
    train, parallel = recipe.train, recipe.parallel
    if train.compile != "auto":
        return train.compile, "by the recipe"
    if train.precision == "fp8":
        return True, "with train.precision = fp8, which is slower than bf16 without it"
    if parallel.schedule == "zero_bubble" and parallel.pp != 1:
        return False, "with parallel.schedule = zero_bubble, which can't be compiled"
    if parallel.ep > 1:
        return False, "with parallel.ep, whose exchanges can't be compiled"
    return device.trains_in_bf16, f"on {device}"
