"""The computation, device hours and money that a run costs; no torch here.

The module also gives the usual training run of a model, for use when there is no recipe.

Source: Chowdhery et al. 2022 (PaLM), appendix B.
"""

from dataclasses import dataclass
from typing import Any

from pipelines.models.config import DecoderConfig
from pipelines.planning.hardware import Hardware
from pipelines.planning.roofs import flops_per_token
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.training_section import Precision

CHINCHILLA = 20  # tokens per parameter: Hoffmann et al. 2022, table 3
# Bytes of text that one core cleans, deduplicates and tokenises per second, without Ray's start:
# two cores reached 2.5 MB/s in `tests/benchmarks/results/preprocess.json`.
PREPROCESS_RATE = 1.25e6


def model_flops(config: DecoderConfig, tokens: float, length: int, trainable: float = 1.0) -> float:
    """Return the FLOPs of training on `tokens` tokens, with attention over `length` tokens."""
    return flops_per_token(config, length, trainable) * tokens


@dataclass(frozen=True)
class StageCost:
    """The time and price of one stage of the pipeline.

    Attributes:
        hours: Wall-clock hours; None if they cannot be predicted.
        price_per_hour: The price of all devices the stage holds; None if it is unknown.
        bound_by: The resource that takes most of its time.
        why_unknown: Why the hours cannot be predicted.
    """

    hours: float | None
    price_per_hour: float | None
    bound_by: str
    why_unknown: str | None = None

    @property
    def cost(self) -> float | None:
        """The stage's cost; None if the hours or the price are unknown."""
        known = self.hours is not None and self.price_per_hour is not None
        return self.hours * self.price_per_hour if known else None  # type: ignore[operator]


def energy_kwh(hardware: Hardware, devices: int, hours: float) -> float:
    """Return the energy of the devices at full load, without their hosts and cooling."""
    return hardware.watts * devices * hours / 1000


LONGEST = 8192  # at most so many tokens per sample, as in Llama 3's pretraining
# Tokens per step: half a million at GPT-2's size (nanoGPT), 4 million from 7B (Llama 2 and 3).
_SMALL_STEP, _LARGE_STEP, _LARGE = 1 << 19, 1 << 22, 2e9
# The QLoRA paper's values for models of up to 13B, as in the recipe llama3-8b-qlora.
_ADAPTER: dict[str, int] = {"steps": 1875, "batch": 16, "sequence": 2048}


def usual_values(
    preset: str, config: DecoderConfig, hardware: Hardware, gpus: int, adapter: str
) -> dict[str, Any]:
    """Return recipe values for 20 tokens per parameter or a fine-tuning; the layout is `auto`.

    Args:
        preset: The model's name.
        config: The model's shape; the recipe's default length is used if its context is open.
        hardware: The device; the run uses its best precision.
        gpus: The number of devices; each gets at least one sample per step.
        adapter: The kind of adapter.
    """
    longest = config.context_length or Recipe.model_fields["data"].default.sequence_length
    length = min(longest, LONGEST if adapter == "none" else _ADAPTER["sequence"])
    tokens = _LARGE_STEP if config.parameters >= _LARGE else _SMALL_STEP
    batch = tokens // length if adapter == "none" else _ADAPTER["batch"]
    batch = max(batch, 1 << (gpus - 1).bit_length())
    steps = -(-CHINCHILLA * config.parameters // (batch * length))
    return {
        "name": preset,
        "data": {"sequence_length": length},
        "model": {"preset": preset},
        "parallel": "auto",
        "train": {
            "steps": max(1, steps) if adapter == "none" else _ADAPTER["steps"],
            "micro_batch_size": "auto",
            "global_batch_size": batch,
            "precision": _precision(hardware),
            "compile": True,
        },
        "adapter": {"kind": adapter},
    }


def _precision(hardware: Hardware) -> Precision:
    """Return a 16-bit precision if the device has one, else fp32."""
    return next((each for each in ("bf16", "fp16") if each in hardware.flops), "fp32")
