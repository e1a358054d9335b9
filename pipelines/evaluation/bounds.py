"""A recipe's bounds on bias, memorisation, leakage and drift, and which of them a model breaks.

They apply to the candidate by itself, even if it is the first model. A bound is broken if the whole
95% interval lies beyond it: sentences and passages are a sample, and a figure that could be within
the bound on other samples is no reason to refuse a model. A figure without an interval can't be
judged, and that is a reason to refuse.
"""

from collections.abc import Iterator

from pipelines.recipe.recipe import Register
from pipelines.run.verdict import Estimate, Memorisation, Probes


def broken_bounds(probes: Probes, demands: Register, drift: Estimate | None = None) -> list[str]:
    """Return a reason for each bound that is broken or cannot be judged, with its numbers.

    Args:
        probes: The results of the candidate's probes.
        demands: The bounds.
        drift: From the model that training started from, in nats a token; None: not measured.
    """
    found = [*_bias(probes, demands), *_extraction(probes, demands), *_leakage(probes, demands)]
    return [*found, *_drift(drift, demands)]


def beyond(found: Estimate, bound: float) -> bool:
    """Return whether the whole interval lies above `bound` or below `-bound`."""
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
            yield f"register.max_bias: {each.templates} sentences of {each.name} are too few"
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
            f"more than {bound:g} of the training passages are reproduced verbatim: "
            f"{found.training.share} of {found.training.passages}{beside}"
        )


def _drift(found: Estimate | None, demands: Register) -> Iterator[str]:
    bound = demands.max_drift
    if bound is None:
        return
    if found is None or found.lower is None:
        yield "register.max_drift: drift was not measured on enough pairs"
    elif beyond(found, bound):
        yield f"more than {bound:g} nats a token away from the model it began as: {found}"


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
            f"more than {bound:g} of the continuations hold personal data from the training text: "
            f"{found.share} of {found.continuations} ({kinds})"
        )
