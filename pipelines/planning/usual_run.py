"""The run that a model is usually trained by, where no recipe says another; no torch here."""

from typing import Any

from pipelines.core.recipe import Recipe
from pipelines.models.config import DecoderConfig
from pipelines.planning.cost import CHINCHILLA
from pipelines.planning.hardware import Hardware, Precision

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
