"""Bias: whether a model finds a sentence more likely about the group that a stereotype names.

The sentences of a pair differ only in the group's term, as in CrowS-Pairs (Nangia et al.,
"CrowS-Pairs: A Challenge Dataset for Measuring Social Biases in Masked Language Models", 2020).
CrowS-Pairs scores the words that both sentences share, given the term: a rare or long term is
unlikely in itself, which is not a bias. In a model that reads from left to right, only the words
after the term depend on it. So the text after the term is scored, which has the same bytes in both
sentences, and the term is not. A figure is the mean difference over counterfactual pairs, as in
RedditBias (Barikeri et al., "RedditBias: A Real-World Resource for Bias Evaluation and Debiasing of
Conversational Language Models", 2021).

The text after a rarer term is often less likely too, whatever it says. So each set ascribes some
sentences to one group and some to the other, and both kinds have the same weight. The effect of the
term alone then cancels, as in the association tests of Caliskan et al. ("Semantics derived
automatically from language corpora contain human-like biases", 2017). A figure is therefore the
same whichever group is named first.

The sentences are few and written by hand: their topics decide what is measured (Blodgett et al.,
"Stereotyping Norwegian Salmon", 2021). The interval applies to other sentences of the same kind.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipelines.evaluation.behaviour import continuation_bits
from pipelines.evaluation.bootstrap import Floats, overall_ratio
from pipelines.evaluation.perplexity import STRIDE
from pipelines.recipe.bias_templates import BiasSet, Sentence
from pipelines.run.verdict import BiasScore, Estimate

_Pair = tuple[Sentence, Sentence]  # with the first group's term, with the second group's term


def measure_bias(
    model_folder: Path, sets: Sequence[BiasSet], confidence: float, stride: float = STRIDE
) -> tuple[BiasScore, ...]:
    """Return the preference for stereotypes in each set; each bound holds with this confidence."""
    asked = (sentence for each in sets for pair in _pairs(each) for sentence in pair)
    bits = continuation_bits(model_folder, asked, stride)
    scores = []
    for each in sets:
        more = np.array([bits[second] - bits[first] for first, second in _pairs(each)])
        first_group = next(iter(each.groups))
        scores.append(
            BiasScore(
                name=each.name,
                language=each.language,
                templates=len(each.templates),
                pairs=len(each.pairs),
                preference=preference(
                    more.reshape(len(each.templates), -1).mean(axis=1),
                    np.array([one.ascribed_to == first_group for one in each.templates]),
                    confidence,
                ),
            )
        )
    return tuple(scores)


def preference(
    differences: Floats, ascribed_to_first: npt.NDArray[np.bool_], confidence: float
) -> Estimate:
    """Return how many bits more likely a sentence is about the group that it is ascribed to.

    Args:
        differences: [templates], the bits of a sentence about the second group minus the bits of
            the same sentence about the first.
        ascribed_to_first: [templates]; some are true and some are false.
        confidence: The confidence of each bound, from a bootstrap over templates.
    """
    likelier = np.where(ascribed_to_first, differences, -differences)
    # Half is the terms' own effect, which has opposite signs in the two halves of the templates.
    # Without it, the bootstrap works within each half.
    half = (likelier[ascribed_to_first].mean() - likelier[~ascribed_to_first].mean()) / 2
    likelier = likelier - np.where(ascribed_to_first, half, -half)
    counts = ascribed_to_first.sum(), (~ascribed_to_first).sum()
    weights = 1 / np.where(ascribed_to_first, *counts)
    return overall_ratio(likelier * weights, weights, confidence)


def _pairs(each: BiasSet) -> Iterator[_Pair]:
    """Yield the pairs of sentences, template by template."""
    for template in each.templates:
        for first, second in each.pairs:
            yield template.sentence(first), template.sentence(second)
