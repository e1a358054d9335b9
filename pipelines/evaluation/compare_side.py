"""One of the two models of a comparison: what its lineage and its run say of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.core.verdict import Probes
from pipelines.evaluation.loss_curve import CurvePoint


@dataclass(frozen=True)
class Side:
    """A model, of which not all need be known: its files may be gone, or another tool's.

    Attributes:
        name: As a person calls it.
        facts: Its lineage, as `lineage.json` holds it; may be empty.
        curve: Its training loss; None where none is kept.
        training: What its training cost, where its result came out of the stage cache: `seconds`,
            `worker_hours`, `gpu_hours`, `money`.
        probes: What was looked for in it.
    """

    name: str
    facts: Mapping[str, Any]
    curve: Sequence[CurvePoint] | None = None
    training: Mapping[str, float] | None = None
    probes: Probes = field(default_factory=Probes)

    def fact(self, *path: str) -> Any:
        """A value of the lineage; None where there is none."""
        found: Any = self.facts
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def cost(self, stage: str) -> Mapping[str, float]:
        """What a stage cost, training wherever it ran; empty where that isn't known."""
        if stage == "train" and self.training:
            return self.training
        return self.fact("cost", stage) or {}

    @property
    def samples(self) -> dict[str, str]:
        """What it wrote after each prompt."""
        prompts = self.fact("recipe", "evaluate", "prompts") or ()
        texts = self.fact("records", "evaluate", "samples") or ()
        return {prompt: text[len(prompt) :] for prompt, text in zip(prompts, texts, strict=False)}
