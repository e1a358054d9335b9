"""A model that learned a stereotype is found; one that learned both sides alike is not."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.evaluation.bias import measure_bias, preference
from pipelines.evaluation.bounds import broken_bounds
from pipelines.models.pretrained import load_pretrained
from pipelines.recipe.bias_templates import BiasSet, load_bias_templates
from pipelines.recipe.recipe import Register
from pipelines.run.verdict import Probes
from tests.unit.evaluation.fitting import END, fit

GENDER = next(each for each in load_bias_templates(None) if each.name == "gender en")
STEPS = 150


def sentences(asked: BiasSet, groups: tuple[str, ...]) -> list[str]:
    """What each group's terms are said of: the sentences that are ascribed to it, or all."""
    return [
        "".join(template.sentence(term))
        for template in asked.templates
        for group in groups or (template.ascribed_to,)
        for term in asked.groups[group]
    ]


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tmp_path_factory.mktemp("biased"), sentences(GENDER, ()), STEPS)


@pytest.fixture(scope="module")
def fair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = sentences(GENDER, ("men", "women"))
    # The women's terms are rare: what follows them is less sure, whatever it is.
    common = sentences(GENDER, ("men",))
    return fit(tmp_path_factory.mktemp("fair"), [*texts, *common, *common], STEPS)


def test_a_model_that_learned_a_stereotype_breaks_the_bound(biased: Path) -> None:
    (score,) = measure_bias(biased, [GENDER], 0.975)
    assert (score.name, score.language, score.templates, score.pairs) == ("gender en", "en", 12, 4)
    assert score.preference.lower > 2
    (reason,) = broken_bounds(Probes(bias=(score,)), Register(max_bias=1.0))
    assert reason.startswith("bias gender en beyond 1 bits a sentence: ")
    assert str(score.preference) in reason
    assert reason.endswith(" on 12 sentences of 4 pairs")


def test_a_model_that_learned_both_sides_alike_keeps_to_it(fair: Path) -> None:
    (score,) = measure_bias(fair, [GENDER], 0.975)
    assert abs(score.preference.value) < 0.5
    assert broken_bounds(Probes(bias=(score,)), Register(max_bias=0.5)) == []


def test_the_opposite_of_a_stereotype_breaks_the_bound_too(biased: Path) -> None:
    other = {"men": "women", "women": "men"}
    turned = [
        template.model_copy(update={"ascribed_to": other[template.ascribed_to]})
        for template in GENDER.templates
    ]
    asked = GENDER.model_copy(update={"templates": tuple(turned)})
    (score,) = measure_bias(biased, [asked], 0.975)
    assert score.preference.upper < -2
    assert broken_bounds(Probes(bias=(score,)), Register(max_bias=1.0))


def test_which_group_is_named_first_does_not_matter(biased: Path) -> None:
    groups = dict(reversed(GENDER.groups.items()))
    assert list(groups) == ["women", "men"]
    turned = GENDER.model_copy(update={"groups": groups})
    assert measure_bias(biased, [turned], 0.975) == measure_bias(biased, [GENDER], 0.975)


def test_it_is_the_likelihood_of_what_follows_the_term(biased: Path) -> None:
    model = load_pretrained(biased).eval()

    def bits(prompt: str, continuation: str) -> float:
        start = len(prompt.encode())
        ids = [END, *(prompt + continuation).encode()]
        with torch.inference_mode():
            logits = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
        nats = [-logits[place, ids[place + 1]].item() for place in range(start, len(ids) - 1)]
        return sum(nats) / math.log(2)

    of_side: dict[str, list[float]] = {"men": [], "women": []}
    for template in GENDER.templates:
        more = [
            bits(*template.sentence(woman)) - bits(*template.sentence(man))
            for man, woman in GENDER.pairs
        ]
        sign = 1 if template.ascribed_to == "men" else -1
        of_side[template.ascribed_to].append(sign * sum(more) / len(more))
    expected = sum(sum(side) / len(side) for side in of_side.values()) / 2
    (score,) = measure_bias(biased, [GENDER], 0.975)
    assert score.preference.value == pytest.approx(expected, rel=1e-4)


def test_what_a_term_does_whatever_is_said_is_no_bias() -> None:
    first = np.array([True] * 8 + [False] * 4)
    ascribed = np.linspace(0.5, 1.5, 12)
    differences = np.where(first, ascribed, -ascribed)
    plain, rare = (preference(differences + shift, first, 0.975) for shift in (0.0, 7.0))
    expected = (ascribed[:8].mean() + ascribed[8:].mean()) / 2
    assert plain.value == pytest.approx(expected)
    for one, other in zip(plain.model_dump().values(), rare.model_dump().values(), strict=True):
        assert one == pytest.approx(other, abs=0.03)  # the resamples are others


def test_the_interval_covers_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    first = np.arange(12) % 2 == 0
    missed = 0
    for _ in range(200):
        ascribed = generator.normal(0.5, 1.0, 12)
        found = preference(np.where(first, ascribed, -ascribed) + 3.0, first, 0.975)
        assert found.lower is not None
        assert found.upper is not None
        missed += not found.lower <= 0.5 <= found.upper
    assert missed <= 18  # 10 are due; more than 18 come once in a hundred


def test_few_sentences_tell_too_little() -> None:
    found = preference(np.array([1.0, -1.0, 1.0, -1.1]), np.arange(4) % 2 == 0, 0.975)
    assert (found.lower, found.upper) == (None, None)


def test_no_sets_load_no_model() -> None:
    assert measure_bias(Path("/nowhere"), [], 0.975) == ()
