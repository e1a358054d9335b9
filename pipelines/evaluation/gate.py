"""The gate's decision whether a candidate replaces the champion, made from their scores alone.

Both are scored on the same held-out documents, each with its own tokenizer; bits per byte can be
compared between tokenizers. The documents are a sample of those the model will meet, so the
improvement has an uncertainty, which the paired bootstrap over documents measures (Koehn,
"Statistical Significance Tests for Machine Translation Evaluation", 2004). A candidate is promoted
if all of these hold:

1. The lower confidence bound of its improvement exceeds `register.min_improvement`: a tie is not
   enough, nor is an improvement that other documents might not show. The confidence grows with the
   number of candidates that this champion was compared with (`spending`). It is an improvement in
   bits per byte, or on the task `register.improves`, question by question; then bits per byte may
   not surely be worse by more than `register.max_slice_regression`.
2. It is on no slice worse than the champion by more than `register.max_slice_regression` with
   `register.confidence`; more confidence would let worse slices pass. Each of K slices gets a K-th
   of the allowed error (Bonferroni), so that a good candidate isn't refused because one slice of
   many looks bad by chance.
3. It passes at least as many cases of each behavioural test as the champion. The cases are all that
   is tested, not a sample, so passing one case fewer is worse.
4. It is on no task of `register.tasks` worse than is allowed there, question by question, with
   `register.confidence`, which the tasks share as the slices do.
5. It stays within the recipe's bounds on bias, memorisation and leakage, as a first model must too.

`register.confidence` applies to all candidates of one champion together: at 0.95, each champion has
a chance of at most 5% to be replaced by a model that is no better, however many there are. A model
that was chosen by its score on the held-out documents is not covered, so a verdict counts their
uses and warns. Fewer than `LEAST_DOCUMENTS` documents are too few for a comparison.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pipelines.core.formatting import probability
from pipelines.evaluation.bootstrap import (
    LEAST_DOCUMENTS,
    RESAMPLES,
    Floats,
    bits_per_byte,
    bootstrap,
)
from pipelines.evaluation.bounds import broken_bounds
from pipelines.evaluation.slices import Slices, slices_of
from pipelines.evaluation.spending import confidence_of
from pipelines.evaluation.task_scores import compare_tasks
from pipelines.recipe.recipe import BITS_PER_BYTE, Register, TaskLimit
from pipelines.run.verdict import (
    BehaviourChange,
    BehaviourScore,
    Comparison,
    Estimate,
    Probes,
    SliceChange,
    TaskChange,
    Turn,
    Verdict,
)


@dataclass(frozen=True)
class Measured:
    """The measurements of a model that the gate uses.

    Attributes:
        model_hash: The hash of the model's content.
        scores: doc_id, bytes and nats, one row for each document; a candidate's scores also have
            the columns that slices are made from.
        behaviours: How many cases of the recipe's tests it passes.
        tasks: Its results on the questions of tasks, as of `task_scores`; None: not asked for.
        probes: The results of a candidate's probes.
        drift: The drift of a candidate that learnt from pairs; None: not measured.
    """

    model_hash: str
    scores: pa.Table
    behaviours: tuple[BehaviourScore, ...] = ()
    tasks: pa.Table | None = None
    probes: Probes = field(default_factory=Probes)
    drift: Estimate | None = None


def decide(
    candidate: Measured, champion: Measured | None, demands: Register, turn: Turn
) -> Verdict:
    """Check a candidate against the recipe's bounds and compare it with the champion, if any.

    Args:
        candidate: The model that was trained.
        champion: The model that it might replace.
        demands: The recipe's requirements for a champion.
        turn: The place of this comparison among the champion's.

    Raises:
        ValueError: The two were not scored on the same documents, or by the same tests.
    """
    verdict = _compared(candidate, champion, demands, turn)
    changes: dict[str, object] = {"probes": candidate.probes}
    broken = broken_bounds(candidate.probes, demands, candidate.drift)
    if broken and verdict.decision != "unchanged":
        changes |= {"decision": "refused", "reason": "; ".join([*broken, verdict.reason])}
    return verdict.model_copy(update=changes)


def _compared(
    candidate: Measured, champion: Measured | None, demands: Register, turn: Turn
) -> Verdict:
    ours = bits_per_byte(candidate.scores)
    if not math.isfinite(ours):
        return refuse(candidate, f"the candidate's bits per byte are {ours}")
    if champion is None:
        reason = f"the first model: {ours:.4f} bits per byte"
        return Verdict(decision="promoted", reason=reason, candidate_bits_per_byte=ours)
    if candidate.model_hash == champion.model_hash:
        return Verdict(
            decision="unchanged",
            reason=f"the candidate is the champion, byte for byte: {ours:.4f} bits per byte",
            candidate_bits_per_byte=ours,
            champion_bits_per_byte=ours,
        )
    theirs = bits_per_byte(champion.scores)
    if not math.isfinite(theirs):
        return refuse(candidate, f"the champion's bits per byte are {theirs}")
    comparison = compare(candidate, champion, demands, turn)
    objection = _objection(comparison, demands, theirs)
    return Verdict(
        decision="refused" if objection else "promoted",
        reason=f"{objection or 'better'}: {_numbers(ours, theirs, comparison)}",
        candidate_bits_per_byte=ours,
        champion_bits_per_byte=theirs,
        comparison=comparison,
    )


def refuse(candidate: Measured, reason: str) -> Verdict:
    """Return a refusal whose reason is not a comparison."""
    return Verdict(
        decision="refused",
        reason=reason,
        candidate_bits_per_byte=bits_per_byte(candidate.scores),
        probes=candidate.probes,
    )


def compare(candidate: Measured, champion: Measured, demands: Register, turn: Turn) -> Comparison:
    """Return the improvement on all documents and each slice, and the passed cases of each test.

    Raises:
        ValueError: The two were not scored on the same documents, or by the same tests.
    """
    tables = [each.scores.sort_by("doc_id") for each in (candidate, champion)]
    if any(not tables[0][column].equals(tables[1][column]) for column in ("doc_id", "bytes")):
        raise ValueError("candidate and champion were scored on different documents")
    ours, theirs, sizes = *map(_bits, tables), _numpy(tables[0], "bytes")
    slices = slices_of(tables[0])
    everything = np.ones((len(sizes), 1), bool)
    found = bootstrap(theirs - ours, sizes, np.concatenate([everything, slices.members], axis=1))
    confidence = confidence_of(turn.number, demands.confidence)
    lower, upper = found.bounds(confidence)
    gain = None
    if demands.improves != BITS_PER_BYTE:
        gain = _on_tasks(candidate, champion, (TaskLimit(task=demands.improves),), confidence)[0]
    slice_confidence = 1 - (1 - demands.confidence) / max(1, len(slices.names))
    of_slices = zip(found.values, *found.bounds(slice_confidence), strict=True)
    return Comparison(
        documents=len(sizes),
        better_on=int((ours < theirs).sum()),
        improvement=Estimate.of(found.values[0], lower[0], upper[0]),
        gain=gain,
        confidence=confidence,
        resamples=RESAMPLES,
        slice_confidence=slice_confidence,
        slices=_changes(slices, ours, theirs, sizes, list(of_slices)[1:], demands),
        behaviours=_behaviour_changes(candidate.behaviours, champion.behaviours),
        tasks=_on_tasks(candidate, champion, demands.asked_tasks, demands.confidence, shared=True),
        turn=turn,
    )


def _changes(
    slices: Slices,
    ours: Floats,
    theirs: Floats,
    sizes: Floats,
    bounds: list[tuple[float, float, float]],
    demands: Register,
) -> tuple[SliceChange, ...]:
    changes = []
    for name, members, found in zip(slices.names, slices.members.T, bounds, strict=True):
        champion = theirs[members].sum() / sizes[members].sum()
        improvement = Estimate.of(*found)
        changes.append(
            SliceChange(
                slice=name,
                documents=int(members.sum()),
                candidate_bits_per_byte=ours[members].sum() / sizes[members].sum(),
                champion_bits_per_byte=champion,
                improvement=improvement,
                regressed=improvement.upper is not None
                and improvement.upper < -demands.max_slice_regression * champion,
            )
        )
    return tuple(changes)


def _behaviour_changes(
    ours: tuple[BehaviourScore, ...], theirs: tuple[BehaviourScore, ...]
) -> tuple[BehaviourChange, ...]:
    if [(each.name, each.cases) for each in ours] != [(each.name, each.cases) for each in theirs]:
        raise ValueError("candidate and champion were not tested with the same behavioural tests")
    return tuple(
        BehaviourChange(
            name=candidate.name,
            cases=candidate.cases,
            candidate_passed=candidate.passed,
            champion_passed=champion.passed,
        )
        for candidate, champion in zip(ours, theirs, strict=True)
    )


def _on_tasks(
    candidate: Measured,
    champion: Measured,
    limits: Sequence[TaskLimit],
    confidence: float,
    *,
    shared: bool = False,
) -> tuple[TaskChange, ...]:
    """Return how the two did on tasks, with a confidence of each bound or `shared` by all tasks."""
    if not limits:
        return ()
    if candidate.tasks is None or champion.tasks is None:
        raise ValueError("candidate and champion were not both put to the tasks of the recipe")
    each = 1 - (1 - confidence) / len(limits) if shared else confidence
    return compare_tasks(candidate.tasks, champion.tasks, limits, each)


def _objection(found: Comparison, demands: Register, theirs: float) -> str | None:
    """Return the most important reason against a promotion, or None if there is none."""
    gain = found.gain
    least = found.improvement.lower if gain is None else gain.improvement.lower
    if found.improvement.upper is None:
        return f"{found.documents} documents are too few, at least {LEAST_DOCUMENTS} are needed"
    if least is None and gain is not None:
        return _too_few(gain)
    if least is None or least <= demands.min_improvement:
        on = "" if gain is None else f" on {gain.task}"
        by = f" by more than {demands.min_improvement:g}" if demands.min_improvement else ""
        return f"not better{on}{by} with {probability(found.confidence)} confidence"
    if gain is not None and found.improvement.upper < -demands.max_slice_regression * theirs:
        return f"worse by more than {demands.max_slice_regression:g} of the bits per byte"
    regressed = [_loss(change) for change in found.slices if change.regressed]
    if regressed:
        return f"worse by more than {demands.max_slice_regression:g} on {', '.join(regressed)}"
    lost = [_task_loss(change) for change in found.tasks if change.regressed]
    if lost:
        return f"worse than register.tasks allows on {', '.join(lost)}"
    unsure = [each for each in found.tasks if each.improvement.upper is None]
    if unsure:
        return _too_few(unsure[0])
    failed = [
        f"{each.name} ({each.candidate_passed} of {each.cases} cases, not {each.champion_passed})"
        for each in found.behaviours
        if each.candidate_passed < each.champion_passed
    ]
    return f"fails more of the behavioural tests: {', '.join(failed)}" if failed else None


def _too_few(change: TaskChange) -> str:
    return (
        f"{change.questions} questions of {change.task} are too few, at least {LEAST_DOCUMENTS} "
        "are needed"
    )


def _loss(change: SliceChange) -> str:
    """Return e.g. `language ko (0.0512 of 1.2041 bits per byte lost on 42 documents)`."""
    return (
        f"{change.slice} ({-change.improvement.value:.4f} of {change.champion_bits_per_byte:.4f} "
        f"bits per byte lost on {change.documents} documents)"
    )


def _task_loss(change: TaskChange) -> str:
    """Return e.g. `arc_easy/acc (0.4120, champion 0.4480, worse on 61 of 500 questions)`."""
    return (
        f"{change.task} ({change.candidate:.4f}, champion {change.champion:.4f}, worse on "
        f"{change.worse_on} of {change.questions} questions, better on {change.better_on})"
    )


def _numbers(ours: float, theirs: float, found: Comparison) -> str:
    lower = found.improvement.lower
    confidence = probability(found.confidence)
    least = "" if lower is None else f", at least {lower:.4f} with {confidence} confidence"
    gain = "" if found.gain is None else f"{_gain(found.gain, confidence)}; "
    return (
        f"{gain}{ours:.4f} bits per byte, champion {theirs:.4f}; improvement "
        f"{found.improvement.value:.4f}{least}; "
        f"better on {found.better_on} of the same {found.documents} documents; {found.turn}"
    )


def _gain(change: TaskChange, confidence: str) -> str:
    """Return e.g. `pairs 0.9478, champion 0.4912; improvement 0.4566, at least 0.41 ...`."""
    lower = change.improvement.lower
    least = "" if lower is None else f", at least {lower:.4f} with {confidence} confidence"
    return (
        f"{change.task} {change.candidate:.4f}, champion {change.champion:.4f}; improvement "
        f"{change.improvement.value:.4f}{least}"
    )


def _bits(scores: pa.Table) -> Floats:
    return _numpy(scores, "nats") / math.log(2)


def _numpy(scores: pa.Table, column: str) -> Floats:
    return np.asarray(scores[column].to_numpy(), np.float64)
