"""The parts of the acceptance: what each must reach, and how long it may take; no torch here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

# What is needed beside torch and transformers, with what these two need; docs/training.md lists it.
WHEELS = {
    "pydantic": "pydantic",
    "pydantic-core": "pydantic_core",
    "annotated-types": "annotated_types",
    "typing-inspection": "typing_inspection",
    "zstandard": "zstandard",
    "accelerate": "accelerate",
    "torchao": "torchao",
}
HERE = "tests.gpu_acceptance"


@dataclass(frozen=True)
class Part:
    """One part of the acceptance, which runs as a process of its own.

    Attributes:
        name: What a user calls it, and its result's file.
        work: The function that does it, as `module:function`; it takes a `Place`.
        seconds: After which it is ended.
        goal: What it is to reach.
        must: Whether the acceptance fails where the goal is missed; else it is only reported.
        gpus: How many the part needs.
    """

    name: str
    work: str
    seconds: int
    goal: str
    must: bool = False
    gpus: int = 1

    def function(self) -> "Callable[[Place], Outcome]":
        """What `work` names."""
        module, _, name = self.work.partition(":")
        found: Callable[[Place], Outcome] = getattr(import_module(f"{HERE}.{module}"), name)
        return found


@dataclass(frozen=True)
class Place:
    """Where a part runs.

    Attributes:
        folder: Empty, for what it writes.
        device: As torch names it.
        fake: Whether to compute with tiny models on a CPU; its figures mean nothing.
        earlier: The results of the parts that ended before, by name.
    """

    folder: Path
    device: str
    fake: bool
    earlier: dict[str, dict[str, Any]] = field(default_factory=dict)

    def result_of(self, name: str) -> dict[str, Any]:
        """What an earlier part found.

        Raises:
            LookupError: that part has no result.
        """
        if name not in self.earlier:
            raise LookupError(f"it needs the result of {name}, which has none: run that part first")
        return self.earlier[name]


@dataclass(frozen=True)
class Outcome:
    """What a part found.

    Attributes:
        figure: The number that its goal is about.
        unit: Of the figure.
        ratio: The figure over what it is compared with; None if there is nothing.
        reached: Whether the goal is.
        limits: In words, what limits the figure.
        detail: Whatever else was measured.
    """

    figure: float
    unit: str
    ratio: float | None
    reached: bool
    limits: str
    detail: dict[str, Any] = field(default_factory=dict)


# All parts for one GPU together: what is not done by then, a second run does.
MOST_SECONDS = 540
# A part's limit is some twice what it took on an H200: hosts differ as much.
PARTS = [
    Part("device", "device_facts:facts", 20, "the GPU has a datasheet"),
    Part("losses", "same_numbers:losses", 30, "20 fp32 losses within 1e-4 of the CPU's", must=True),
    Part("memory", "peak_memory:memory", 45, "dry run within 8 % of the allocator", must=True),
    Part("resume", "same_numbers:resume", 60, "no number differs after a resume", must=True),
    Part("readers", "device_facts:readers", 25, "pinned >= 3 x np.memmap"),
    Part("gpt2", "training_speed:gpt2", 60, "the planner's tokens/s"),
    Part("copies", "same_numbers:copies", 90, "no number differs after a copy", must=True),
    Part("gpt2-hf", "training_speed:gpt2_beside_hf", 60, ">= 1.15 x HF Trainer, eager"),
    Part("llama-1b", "training_speed:llama", 75, "MFU >= 0.50 (0.60 is the goal)"),
    Part("llama-1b-hf", "training_speed:llama_beside_hf", 60, ">= 1.15 x HF Trainer, eager"),
    Part("trace", "training_speed:trace", 20, "device busy >= 0.95 of three steps"),
    Part("lora-8b", "training_speed:lora", 75, ">= 12,473 tokens/s"),
    Part(
        "qlora-8b", "training_speed:qlora", 120, "<= 0.55 of LoRA's memory at >= 0.8 of its speed"
    ),
    Part("fp8", "training_speed:fp8", 90, ">= 1.15 x bf16"),
    Part("packed", "packed_attention:packed", 80, "varlen_attn gives flex's result, as fast"),
    Part("ladder", "peak_memory:ladder", 80, "each rung saves what it promises"),
    Part("kinds", "further_kinds:kinds", 140, "fp32 as on the CPU, bf16 within 5 %"),
    Part("mixture", "further_kinds:mixture", 90, "compiled >= 1.1 x eager"),
    Part("nccl", "same_numbers:ranks", 60, "losses as of one GPU, within 1e-4", must=True, gpus=2),
    Part("async-tp", "async_tp:async_tp", 120, "faster than tp, and the same losses", gpus=2),
]


def named(name: str) -> Part:
    """The part of a name."""
    return next(part for part in PARTS if part.name == name)
