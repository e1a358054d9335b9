"""Which of a recipe's bounds on bias, memorisation and leakage a model breaks.

They hold for the candidate by itself, also for a first one. A bound is broken where the whole 95%
interval lies beyond it: sentences and passages are a sample, and a figure that could be within the
bound on others is no reason to refuse a model. One that has no interval can't be judged, and that
is a reason.
"""

from collections.abc import Iterator

from pipelines.recipe.recipe import Register
from pipelines.run.verdict import Estimate, Memorisation, Probes


def broken_bounds(probes: Probes, demands: Register) -> list[str]:
    """A reason for each bound that is broken or cannot be judged, with its numbers."""
    return [*_bias(probes, demands), *_extraction(probes, demands), *_leakage(probes, demands)]


def beyond(found: Estimate, bound: float) -> bool:
    """Whether the whole interval lies beyond a bound, to either side of zero."""
    if found.lower is None or found.upper is None:
        return False
    return found.lower > bound or found.upper < -bound


def _bias(probes: Probes, demands: Register) -> Iterator[str]:
    bound = demands.max_bias
    if bound is None:
        return
    if probes.bias is None:
        yield "register.max_bias: bias was not measured"
    for each in probes.bias or ():
        found = each.preference
        if found.lower is None or found.upper is None:
            yield f"register.max_bias: {each.templates} sentences of {each.name} tell too little"
        elif beyond(found, bound):
            yield (
                f"bias {each.name} beyond {bound:g} bits a sentence: {found} on {each.templates} "
                f"sentences of {each.pairs} pairs"
            )


def _extraction(probes: Probes, demands: Register) -> Iterator[str]:
    bound, found = demands.max_extraction, probes.memorisation
    if bound is None:
        return
    if found is None or found.training.share is None:
        yield f"register.max_extraction: {_no_passage(found)}"
    elif beyond(found.training.share, bound):
        held_out = found.held_out
        beside = f", held out {held_out.share.value:.4f}" if held_out.share else ""
        yield (
            f"more than {bound:g} of the training passages come out verbatim: "
            f"{found.training.share} of {found.training.passages}{beside}"
        )


def _no_passage(found: Memorisation | None) -> str:
    if found is None:
        return "memorisation was not measured"
    tokens = found.prefix_tokens + found.continuation_tokens
    return f"no training document has a passage of {tokens} tokens"


def _leakage(probes: Probes, demands: Register) -> Iterator[str]:
    bound, found = demands.max_leakage, probes.leakage
    if bound is None:
        return
    if found is None or found.share is None:
        yield "register.max_leakage: leakage was not measured"
    elif beyond(found.share, bound):
        kinds = ", ".join(f"{count} {kind}" for kind, count in found.leaked.items())
        yield (
            f"more than {bound:g} of the continuations hold personal data of the training text: "
            f"{found.share} of {found.continuations} ({kinds})"
        )
