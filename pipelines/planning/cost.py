"""The run that a model is usually trained by, where no recipe says another; no torch here.

How much computation a run is, how many hours of devices, and what they cost; no torch here.

Sources: Kaplan et al. 2020 and Hoffmann et al. 2022 (6 N D); Chowdhery et al. 2022 (PaLM), section
4.1 and appendix B.
"""

from dataclasses import dataclass
from typing import Any

from pipelines.models.config import DecoderConfig
from pipelines.planning.hardware import Hardware, Precision
from pipelines.planning.roofs import flops_per_token
from pipelines.recipe.recipe import Recipe

CHINCHILLA = 20  # tokens a parameter: Hoffmann et al. 2022, table 3
# Bytes of text a second and core, cleaned, without duplicates and cut into tokens: 2.5 MB/s on two
# cores, `tests/benchmarks/results/preprocess.json`. Ray's start is not in it.
PREPROCESS_RATE = 1.25e6


def training_flops(parameters: float, tokens: float) -> float:
    """6 N D: a multiplication and an addition a weight, forward and twice backward."""
    return 6 * parameters * tokens


def model_flops(config: DecoderConfig, tokens: float, length: int, trainable: float = 1.0) -> float:
    """Return the FLOPs of training on so many tokens, with attention over samples of `length`."""
    return flops_per_token(config, length, trainable) * tokens


def device_hours(flops: float, hardware: Hardware, precision: Precision, mfu: float) -> float:
    """Hours of one device that reaches this share of its peak."""
    return flops / (hardware.peak(precision) * mfu) / 3600


@dataclass(frozen=True)
class StageCost:
    """One stage of the pipeline.

    Attributes:
        hours: By the clock; None where they can't be told beforehand.
        price_per_hour: Of all devices it holds; None where their price is unknown.
        bound_by: The resource that takes most of its time.
        why_unknown: Why they can't be told.
    """

    hours: float | None
    price_per_hour: float | None
    bound_by: str
    why_unknown: str | None = None

    @property
    def cost(self) -> float | None:
        """The stage's cost; None where hours or price are unknown."""
        known = self.hours is not None and self.price_per_hour is not None
        return self.hours * self.price_per_hour if known else None  # type: ignore[operator]


def energy_kwh(hardware: Hardware, devices: int, hours: float) -> float:
    """Return the energy of the devices at full load, without their hosts and cooling."""
    return hardware.watts * devices * hours / 1000


LONGEST = 8192  # tokens of a sample, where the model's context is longer: Llama 3's pretraining
# Tokens of a step: GPT-2's size has half a million (nanoGPT), 7B and more four (Llama 2 and 3).
_SMALL_STEP, _LARGE_STEP, _LARGE = 1 << 19, 1 << 22, 2e9
# The paper's of QLoRA for models of up to 13B, as in the recipe llama3-8b-qlora.
_ADAPTER: dict[str, int] = {"steps": 1875, "batch": 16, "sequence": 2048}


def usual_values(
    preset: str, config: DecoderConfig, hardware: Hardware, gpus: int, adapter: str
) -> dict[str, Any]:
    """A recipe's values: 20 tokens a parameter, or a fine-tuning; the layout is left open.

    Args:
        preset: The model's name.
        config: Its shape; of an open context and vocabulary, as the recipe's defaults are.
        hardware: Whose best precision is taken.
        gpus: Each gets a sample a step at least.
        adapter: Its kind.
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
    """Half the width where the device has it."""
    return next((each for each in ("bf16", "fp16") if each in hardware.flops), "fp32")
