"""What evaluation measures, what the gate decides of it, and why: small, frozen and JSON-able."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pipelines.core.formatting import UNKNOWN, decimals


class _Figures(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Estimate(_Figures):
    """A figure of some documents, and within what it lies for others of their kind.

    Each bound alone holds with the confidence that stands beside the estimate, both together with
    as much less as one may fail: 0.9 for 0.95.
    """

    value: float
    lower: float | None  # None: too few documents for a bound
    upper: float | None

    @classmethod
    def of(cls, value: float, lower: float, upper: float) -> "Estimate":
        """Make an estimate with None for a bound that is not finite."""
        bounds = (each if math.isfinite(each) else None for each in (lower, upper))
        return cls(value=float(value), lower=next(bounds), upper=next(bounds))

    def __str__(self) -> str:
        return f"{self.value:.4f} ({_short(self.lower)} to {_short(self.upper)})"


class Slice(_Figures):
    """Some of the documents: those of one source, language or length."""

    dimension: Literal["source", "language", "length"]
    name: str

    def __str__(self) -> str:
        return f"{self.dimension} {self.name}"


class SliceScore(_Figures):
    """How good a model is on one slice."""

    slice: Slice
    documents: int
    bytes: int
    bits_per_byte: Estimate


class ExactMatch(_Figures):
    """How many held-out questions a model answers right."""

    questions: int
    right: int
    share: Estimate  # by Wilson's interval


class HarnessScore(_Figures):
    """A metric of a task of lm-evaluation-harness, as that computes it."""

    task: str
    metric: str
    value: float
    stderr: float | None  # None where the harness has none for this metric
    documents: int | None  # None of a group of tasks
    higher_is_better: bool | None = None


class FormScore(_Figures):
    """A form in which a model can be served, as it was written and measured."""

    form: Literal["bf16", "int8", "int4"]
    bits_per_byte: float
    lost: float  # bits per byte, against the model as it was trained
    weight_bytes: int
    serving_bytes: int  # with keys, values and activations
    fits: bool
    good: bool  # within the allowed loss


class RightSize(_Figures):
    """Which form of a model serves within a memory budget, and by what numbers."""

    budget_gb: float
    max_loss: float  # bits per byte
    sequences: int  # at once
    tokens: int  # of each
    trained_bits_per_byte: float  # of the model as it was trained
    forms: tuple[FormScore, ...]
    left_out: tuple[str, ...] = ()  # why a form can't be made
    chosen: FormScore | None = None
    model_hash: str | None = None  # of the chosen form
    refusal: str | None = None  # where none is chosen

    def __str__(self) -> str:
        if self.chosen is None:
            return str(self.refusal)
        return (
            f"served as {self.chosen.form}: {self.chosen.serving_bytes / 1e9:.3g} of "
            f"{self.budget_gb:g} GB, {self.chosen.lost:+.4f} bits per byte against the model as "
            "trained"
        )


class BehaviourScore(_Figures):
    """How many cases of a behavioural test a model passes."""

    name: str
    kind: Literal["minimum_functionality", "invariance", "directional"]
    cases: int
    passed: int


class BiasScore(_Figures):
    """How much likelier a model finds sentences about the group that a stereotype says them of.

    In bits a sentence: at 1 they are twice as likely as about the other group, at -1 half as
    likely.
    """

    name: str  # of the set of templates
    language: str
    templates: int
    pairs: int
    preference: Estimate


class Extraction(_Figures):
    """How many passages a model continues verbatim."""

    passages: int
    extracted: int
    share: Estimate | None  # by Wilson's interval; None: no text is long enough


class Memorisation(_Figures):
    """What a model has by heart, beside what it guesses of text that it never saw."""

    prefix_tokens: int
    continuation_tokens: int
    training: Extraction
    held_out: Extraction


class Leakage(_Figures):
    """Personal data in what a model writes, which its prompt did not tell it."""

    continuations: int
    leaking: int  # of them; with something that stands in the training text
    share: Estimate | None
    found: dict[str, int] = {}  # by kind, made up or not
    leaked: dict[str, int] = {}  # of these, what stands in the training text

    def kinds(self) -> str:
        """`2 of 3 email`: how much of each kind that was found stands in the training text."""
        return ", ".join(
            f"{self.leaked.get(kind, 0):,} of {count:,} {kind.replace('_', ' ')}"
            for kind, count in self.found.items()
        )


class Probes(_Figures):
    """What was looked for in a model besides how well it predicts; None: it was not."""

    bias: tuple[BiasScore, ...] | None = None
    memorisation: Memorisation | None = None
    leakage: Leakage | None = None

    def missing(self) -> list[str]:
        """What was not looked for, in words for a user."""
        looked_for = {
            "bias": self.bias,
            "memorised training text": self.memorisation,
            "leaked personal data": self.leakage,
        }
        return [name for name, found in looked_for.items() if found is None]

    def figures(self) -> dict[str, float]:
        """The main numbers by name, for a tracker."""
        figures = {f"bias/{each.name}": each.preference.value for each in self.bias or ()}
        named = {}
        if found := self.memorisation:
            named["memorisation/training"] = found.training.share
            named["memorisation/held_out"] = found.held_out.share
        if self.leakage:
            named["leakage"] = self.leakage.share
        figures |= {name: share.value for name, share in named.items() if share}
        return {name: value for name, value in figures.items() if math.isfinite(value)}


class BehaviourChange(_Figures):
    """How the candidate compares with the champion on one behavioural test."""

    name: str
    cases: int
    candidate_passed: int
    champion_passed: int


class SliceChange(_Figures):
    """How the candidate compares with the champion on one slice."""

    slice: Slice
    documents: int
    candidate_bits_per_byte: float
    champion_bits_per_byte: float
    improvement: Estimate  # bits per byte; its bounds are as wide as so many slices ask
    regressed: bool  # beyond what the recipe allows


class Comparison(_Figures):
    """Candidate and champion on the same documents."""

    documents: int
    better_on: int  # of the documents
    improvement: Estimate  # bits per byte: the champion's less the candidate's
    confidence: float  # of each bound
    resamples: int
    slice_confidence: float  # of each slice's bounds
    slices: tuple[SliceChange, ...] = ()
    behaviours: tuple[BehaviourChange, ...] = ()


class Verdict(_Figures):
    """What the gate decided and why."""

    decision: Literal["promoted", "refused", "needs approval", "unchanged"]
    reason: str
    candidate_bits_per_byte: float
    champion_bits_per_byte: float | None = None
    comparison: Comparison | None = None  # where there was a champion to compare with
    probes: Probes = Probes()  # of the candidate

    def figures(self) -> dict[str, float]:
        """The main numbers by name, for a tracker that takes finite ones only."""
        figures: dict[str, Any] = {
            "candidate_bits_per_byte": self.candidate_bits_per_byte,
            "champion_bits_per_byte": self.champion_bits_per_byte,
        }
        if self.comparison:
            found = self.comparison.improvement
            figures |= {"improvement": found.value, "improvement_lower_bound": found.lower}
        return {
            name: value
            for name, value in figures.items()
            if value is not None and math.isfinite(value)
        }


HARNESS_COLUMNS = ("task", "documents", "value", "standard error")


def harness_rows(scores: Sequence[HarnessScore]) -> list[tuple[str, ...]]:
    """What lm-evaluation-harness found, as it names it."""
    return [
        (
            f"{each.task}: {each.metric}",
            UNKNOWN if each.documents is None else f"{each.documents:,}",
            decimals(each.value),
            decimals(each.stderr),
        )
        for each in scores
    ]


def _short(bound: float | None) -> str:
    return "?" if bound is None else f"{bound:.4f}"
