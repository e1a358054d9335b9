"""The figures of evaluation and the gate's verdict: small, frozen and JSON-serialisable."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipelines.core.formatting import UNKNOWN, decimals


class _Figures(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Estimate(_Figures):
    """A figure measured on some documents, with bounds for other documents of the same kind.

    Each bound alone holds with the confidence given beside the estimate. Both together hold with
    a lower confidence, since either may fail: 0.9 for 0.95.
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
    """The documents of one source, language or length."""

    dimension: Literal["source", "language", "length"]
    name: str

    def __str__(self) -> str:
        return f"{self.dimension} {self.name}"


class SliceScore(_Figures):
    """A model's score on one slice."""

    slice: Slice
    documents: int
    bytes: int
    bits_per_byte: Estimate


class ExactMatch(_Figures):
    """The number of held-out questions that a model answers correctly."""

    questions: int
    right: int
    share: Estimate  # by Wilson's interval


class PairScore(_Figures):
    """Which answers a model prefers on held-out pairs of a chosen and a rejected one.

    A reward that falls for chosen answers, too, says that the model moves away from both.
    """

    pairs: int
    right: Estimate  # share whose chosen answer has the larger reward, by Wilson's interval
    short_pairs: int  # those whose chosen answer is the shorter one
    right_of_short: Estimate | None  # a model that only learnt to say more prefers few of them
    margin: float  # of the rewards, on average
    reward_of_chosen: float
    reward_of_rejected: float
    drift: Estimate | None = None  # from the model that training started from, in nats a token

    def figures(self) -> dict[str, float]:
        """Return the main numbers by name, for a tracker."""
        known = {"right": self.right, "right_of_short": self.right_of_short, "drift": self.drift}
        return {
            **{f"pairs/{name}": found.value for name, found in known.items() if found},
            "pairs/margin": self.margin,
            "pairs/reward_of_chosen": self.reward_of_chosen,
            "pairs/reward_of_rejected": self.reward_of_rejected,
        }


class HarnessScore(_Figures):
    """A metric of a task, as lm-evaluation-harness computes it."""

    task: str
    metric: str
    value: float
    stderr: float | None  # None if the harness has none for this metric
    documents: int | None  # None for a group of tasks
    higher_is_better: bool | None = None


class FormScore(_Figures):
    """A form in which a model can be served, and which was written and measured."""

    form: Literal["bf16", "int8", "int4"]
    bits_per_byte: float
    lost: float  # bits per byte more than the model as it was trained
    weight_bytes: int
    serving_bytes: int  # with keys, values and activations
    fits: bool
    good: bool  # within the allowed loss


class RightSize(_Figures):
    """The form of a model that fits a memory budget, and the numbers behind the choice."""

    budget_gb: float
    max_loss: float  # bits per byte
    sequences: int  # at once
    tokens: int  # of each
    trained_bits_per_byte: float  # of the model as it was trained
    forms: tuple[FormScore, ...]
    left_out: tuple[str, ...] = ()  # the reasons why forms cannot be made
    chosen: FormScore | None = None
    model_hash: str | None = None  # of the chosen form
    refusal: str | None = None  # the reason if no form is chosen

    def __str__(self) -> str:
        if self.chosen is None:
            return str(self.refusal)
        return (
            f"served as {self.chosen.form}: {self.chosen.serving_bytes / 1e9:.3g} of "
            f"{self.budget_gb:g} GB, {self.chosen.lost:+.4f} bits per byte against the model as "
            "trained"
        )


ServedCheckName = Literal[
    "files",
    "data type",
    "context",
    "trained weights",
    "evaluated weights",
    "adapter",
    "tokenizer",
    "conversations",
    "training data",
    "end of text",
]


class ServedCheck(_Figures):
    """Whether the written model is, in one respect, the model that was trained."""

    name: ServedCheckName
    holds: bool
    found: str  # what was compared, with figures

    def __str__(self) -> str:
        return f"{self.name}: {self.found}"


class BehaviourScore(_Figures):
    """The number of cases of a behavioural test that a model passes."""

    name: str
    kind: Literal["minimum_functionality", "invariance", "directional"]
    cases: int
    passed: int


class BiasScore(_Figures):
    """How much more likely a model finds sentences about the group that a stereotype names.

    The preference is in bits per sentence: at 1 the sentences are twice as likely as about the
    other group, at -1 half as likely.
    """

    name: str  # of the set of templates
    language: str
    templates: int
    pairs: int
    preference: Estimate


class Extraction(_Figures):
    """The number of passages that a model continues verbatim."""

    passages: int
    extracted: int
    share: Estimate | None  # by Wilson's interval; None: no text is long enough


class Memorisation(_Figures):
    """The training text that a model has memorised, and its guesses on text it never saw."""

    prefix_tokens: int
    continuation_tokens: int
    training: Extraction
    held_out: Extraction


class Leakage(_Figures):
    """Personal data that a model writes although its prompt does not contain it."""

    continuations: int
    leaking: int  # the continuations with personal data that is in the training text
    share: Estimate | None
    found: dict[str, int] = {}  # by kind, whether invented or not
    leaked: dict[str, int] = {}  # by kind, the part of `found` that is in the training text

    def kinds(self) -> str:
        """Return how many of each kind are in the training text, such as `2 of 3 email`."""
        return ", ".join(
            f"{self.leaked.get(kind, 0):,} of {count:,} {kind.replace('_', ' ')}"
            for kind, count in self.found.items()
        )


class Probes(_Figures):
    """The results of probes besides prediction quality; None for a probe that was not run."""

    bias: tuple[BiasScore, ...] | None = None
    memorisation: Memorisation | None = None
    leakage: Leakage | None = None

    def missing(self) -> list[str]:
        """Return the names of the probes that were not run, in words for a user."""
        looked_for = {
            "bias": self.bias,
            "memorised training text": self.memorisation,
            "leaked personal data": self.leakage,
        }
        return [name for name, found in looked_for.items() if found is None]

    def figures(self) -> dict[str, float]:
        """Return the main numbers by name, for a tracker."""
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
    """The candidate compared with the champion on one behavioural test."""

    name: str
    cases: int
    candidate_passed: int
    champion_passed: int


class TaskChange(_Figures):
    """The candidate compared with the champion on the same questions of one task."""

    task: str
    questions: int
    candidate: float  # the mean of its results
    champion: float
    improvement: Estimate  # its bounds are widened for the number of tasks
    better_on: int  # of the questions
    worse_on: int
    regressed: bool  # worse than the recipe allows


class SliceChange(_Figures):
    """The candidate compared with the champion on one slice."""

    slice: Slice
    documents: int
    candidate_bits_per_byte: float
    champion_bits_per_byte: float
    improvement: Estimate  # bits per byte; its bounds are widened for the number of slices
    regressed: bool  # worse than the recipe allows


# Of 20 equal models, the best looks 1.87 standard errors better on average, which is more than the
# 1.64 that a single comparison at 95% demands. So whoever picks by these scores picks chance.
MOST_USES = 20


class Turn(_Figures):
    """The place of a comparison among all that one registered model's champions have had."""

    number: int = Field(1, ge=1)  # of the candidate among those of this champion
    uses: int = Field(1, ge=1)  # comparisons that used these held-out documents, with this one
    part: int = Field(1, ge=1)  # of the held-out documents, on which this one was made
    parts: int = Field(1, ge=1)

    @property
    def warning(self) -> str:
        """The warning that the held-out documents are worn out; empty if they are not."""
        if self.uses <= MOST_USES:
            return ""
        return (
            f"the held-out documents have been used for {self.uses} comparisons, more than "
            f"{MOST_USES}: the best of so many equal models looks better by chance, so do not "
            "choose models or settings by these scores, and add documents to the data"
        )

    def __str__(self) -> str:
        times = "once" if self.uses == 1 else f"{self.uses} times"
        part = f"part {self.part} of {self.parts} of the " if self.parts > 1 else ""
        return (
            f"candidate {self.number} compared with this champion; {part}held-out documents used "
            f"{times}"
        )


class Comparison(_Figures):
    """The candidate compared with the champion on the same documents."""

    documents: int
    better_on: int  # of the documents
    improvement: Estimate  # the champion's bits per byte minus the candidate's
    gain: TaskChange | None = None  # if the candidate must improve a task, with this confidence
    confidence: float  # of each bound; that of this turn
    resamples: int
    slice_confidence: float  # of each slice's bounds
    slices: tuple[SliceChange, ...] = ()
    behaviours: tuple[BehaviourChange, ...] = ()
    tasks: tuple[TaskChange, ...] = ()
    turn: Turn | None = None  # None: of a time when each candidate had the whole error


class Judgement(_Figures):
    """Whose text a language model preferred, prompt by prompt; it decides nothing.

    Each pair was shown in both orders. A text is preferred if it was so in both.
    """

    judge: str
    pairs: int
    candidate: int = 0  # pairs in which the candidate's text was preferred
    champion: int = 0
    neither: int = 0
    changed: int = 0  # pairs in which the choice changed with the order
    failure: str | None = None  # why there is no judgement

    def __str__(self) -> str:
        if self.failure:
            return f"the judge {self.judge} could not compare: {self.failure}"
        text = (
            f"the judge {self.judge} preferred the candidate's text for {self.candidate:,} of "
            f"{self.pairs:,} prompts, the champion's for {self.champion:,}, and neither for "
            f"{self.neither:,}"
        )
        return f"{text}; its choice changed with the order for {self.changed:,}"

    def figures(self) -> dict[str, float]:
        """Return shares of the prompts by name, for a tracker."""
        if self.failure:
            return {}
        shares = {
            "candidate": self.candidate,
            "champion": self.champion,
            "neither": self.neither,
            "agreement": self.pairs - self.changed,
        }
        return {f"judge/{name}": count / self.pairs for name, count in shares.items()}


class Verdict(_Figures):
    """The gate's decision and its reason."""

    decision: Literal["promoted", "refused", "needs approval", "unchanged"]
    reason: str
    candidate_bits_per_byte: float
    champion_bits_per_byte: float | None = None
    comparison: Comparison | None = None  # if there was a champion to compare with
    probes: Probes = Probes()  # the candidate's
    judgement: Judgement | None = None  # beside the decision

    @property
    def warning(self) -> str:
        """What a user should know besides the reason; empty if there is nothing."""
        turn = self.comparison.turn if self.comparison else None
        return turn.warning if turn else ""

    def figures(self) -> dict[str, float]:
        """Return the main numbers by name, for a tracker that takes finite ones only."""
        figures: dict[str, Any] = {
            "candidate_bits_per_byte": self.candidate_bits_per_byte,
            "champion_bits_per_byte": self.champion_bits_per_byte,
        }
        if self.comparison:
            found = self.comparison.improvement
            figures |= {"improvement": found.value, "improvement_lower_bound": found.lower}
        if self.judgement:
            figures |= self.judgement.figures()
        return {
            name: value
            for name, value in figures.items()
            if value is not None and math.isfinite(value)
        }


HARNESS_COLUMNS = ("task", "documents", "value", "standard error")


def harness_rows(scores: Sequence[HarnessScore]) -> list[tuple[str, ...]]:
    """Return the rows of a table of lm-evaluation-harness's results, under its own names."""
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
