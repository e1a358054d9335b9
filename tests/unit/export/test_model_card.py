"""The card as users and as Hugging Face's own library read it."""

from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from pipelines.export.model_card import model_card
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import (
    DatasetRef,
    EvaluateRecord,
    PreprocessRecord,
    Split,
    TrainRecord,
)
from pipelines.run.verdict import (
    BehaviourScore,
    BiasScore,
    Comparison,
    Estimate,
    ExactMatch,
    Extraction,
    HarnessScore,
    Leakage,
    Memorisation,
    Probes,
    Slice,
    SliceChange,
    SliceScore,
    Verdict,
)
from tests.unit.served_form import served_as_int8

FACTS = {
    "run": {"git_commit": "c0ffee", "dirty": True},
    "environment": {"lock": "10c4"},
    "trained_on": {"gpu": {"names": ["NVIDIA H100", "NVIDIA H100"]}, "versions": {"torch": "2.13"}},
    "cost": {
        "preprocess": {"seconds": 0.0, "worker_hours": 0.0, "gpu_hours": 0.0, "money": 0.0},
        "train": {"seconds": 7200.0, "worker_hours": 4.0, "gpu_hours": 4.0, "money": 12.5},
    },
}


def card(
    facts: dict[str, Any] | None = None,
    verdict: Verdict | None = None,
    measured: dict[str, Any] | None = None,
    **sections: object,
) -> str:
    recipe = Recipe.model_validate({"name": "small", **sections})
    split = Split(documents=2, bytes=50, tokens=50, shards=())
    dataset = DatasetRef(vocab_size=257, train=split, validation=split, directory_hash="d.dir")
    train = TrainRecord(
        model="model",
        model_hash="abc",
        parameters=1234,
        steps=5,
        tokens=60,
        layout={"dp_shard": 8, "tp": 2},
        metrics={},
    )
    evaluate = EvaluateRecord(
        bits_per_byte=2.5,
        perplexity=9.0,
        documents=2,
        bytes=50,
        data_hash="def",
        baselines={"xz": 3.0},
        samples=(),
    ).model_copy(update=measured or {})
    stats = {"documents": {"in": 7, "kept": 4, "dropped": {"near_duplicate": 2, "<b>|": 1}}}
    first = Verdict(decision="promoted", reason="the first model", candidate_bits_per_byte=2.5)
    return model_card(
        recipe,
        PreprocessRecord(dataset=dataset, stats=stats),
        train,
        evaluate,
        facts or {},
        verdict or first,
        "llama",
    )


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({}, "(5 steps, 60 tokens).\n"),
        ({}, "it follows no instructions"),
        ({"model": {"init_from": "/far/away/base"}}, "started from `base`.\n"),
        (
            {"model": {"init_from": "base"}, "adapter": {"kind": "qlora"}},
            "started from `base`, whose weights\nQLoRA did not change",
        ),
        ({"data": {"instruction": {"kind": "messages"}}}, "by the tokenizer's chat template"),
    ],
)
def test_it_says_where_the_weights_come_from_and_what_they_are_for(
    sections: dict[str, object], line: str
) -> None:
    assert line in card(**sections)


MEASURED = {
    "interval": Estimate(value=2.5, lower=2.25, upper=2.75),
    "slices": (
        SliceScore(
            slice=Slice(dimension="language", name="ko"),
            documents=20,
            bytes=400,
            bits_per_byte=Estimate(value=3.0, lower=2.5, upper=3.5),
        ),
        SliceScore(
            slice=Slice(dimension="language", name="uncertain"),
            documents=30,
            bytes=500,
            bits_per_byte=Estimate(value=2.0, lower=None, upper=None),
        ),
    ),
    "behaviours": (BehaviourScore(name="returns", kind="invariance", cases=4, passed=3),),
    "exact_match": ExactMatch(
        questions=10, right=5, share=Estimate(value=0.5, lower=0.25, upper=0.75)
    ),
}


OF_TEXT = ("bits_per_byte", "perplexity")


def results(text: str) -> dict[tuple[str, str | None], Any]:
    """As the Hub's own library finds them, by metric and part of the data."""
    found = ModelCard(text).data.eval_results
    return {(each.metric_name, each.dataset_config): each for each in found}


def test_the_hubs_library_reads_each_result_with_its_interval() -> None:
    text = card(measured=MEASURED, register={"license": "apache-2.0", "model_name": "a b"})
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag, data.license) == (
        "transformers",
        "text-generation",
        "apache-2.0",
    )
    assert (data.language, data.tags, data.model_name) == (["ko"], ["penstock", "llama"], "a b")
    found = results(text)
    assert {key: each.metric_value for key, each in found.items()} == {
        ("Bits per byte", None): 2.5,
        ("Bits per byte", "language ko"): 3.0,
        ("Bits per byte", "language uncertain"): 2.0,
        ("Perplexity a token", None): 9.0,
        ("returns (invariance)", None): 0.75,
        ("Held-out questions, exact match", None): 0.5,
    }
    bounds = {key: each.metric_args for key, each in found.items() if each.metric_args}
    assert bounds == {
        ("Bits per byte", None): {"confidence": 0.95, "lower": 2.25, "upper": 2.75},
        ("Bits per byte", "language ko"): {"confidence": 0.95, "lower": 2.5, "upper": 3.5},
        ("Held-out questions, exact match", None): {
            "confidence": 0.95,
            "lower": 0.25,
            "upper": 0.75,
        },
    }


def test_without_intervals_slices_or_a_license_the_card_is_as_valid() -> None:
    text = card(measured={"perplexity": float("inf")})
    assert set(results(text)) == {("Bits per byte", None)}
    front = yaml.safe_load(text.split("---\n")[1])
    assert {"license", "language", "datasets"}.isdisjoint(front)
    assert "No licence of the weights is recorded" in text
    assert "The cost is unknown" in text


def test_a_dataset_of_the_hub_is_named_as_one() -> None:
    source = {"kind": "huggingface", "path": "roneneldan/TinyStories"}
    assert ModelCard(card(data={"source": source})).data.datasets == ["roneneldan/TinyStories"]


def test_users_read_intervals_tests_data_layout_cost_and_how_to_go_on() -> None:
    text = card(
        FACTS, measured=MEASURED, register={"intended_use": "Only demos.", "model_name": "m"}
    )
    for line in (
        "| **this model** | **2.5000** | 2.2500 to 2.7500 |",
        "| language ko | 20 | 3.0000 | 2.5000 to 3.5000 |",
        "| returns | invariance | 3 of 4 |",
        "| held-out questions | exact match | 5 of 10 (share 0.250 to 0.750) |",
        "Of 7 documents, 4 were kept. Dropped: 2 near duplicate, 1 &lt;b>\\|.",
        "DVC's hash of it is `d.dir`.",
        "| layout over processes | dp_shard 8, tp 2 |",
        "| machine of rank 0 | 2 x NVIDIA H100 |",
        "| train | 2 h | 4 | 4 | 12.5 |",
        "Commit `c0ffee` with uncommitted changes",
        '    penstock models reproduce "m@N"',
        "Only demos. It continues text",
    ):
        assert line in text


PROBES = Probes(
    bias=(
        BiasScore(
            name="gender en",
            language="en",
            templates=12,
            pairs=4,
            preference=Estimate(value=0.5, lower=0.25, upper=0.75),
        ),
        BiasScore(
            name="gender ko",
            language="ko",
            templates=2,
            pairs=4,
            preference=Estimate(value=-0.5, lower=None, upper=None),
        ),
    ),
    memorisation=Memorisation(
        prefix_tokens=50,
        continuation_tokens=40,
        training=Extraction(
            passages=100, extracted=6, share=Estimate(value=0.06, lower=0.03, upper=0.11)
        ),
        held_out=Extraction(passages=0, extracted=0, share=None),
    ),
    leakage=Leakage(
        continuations=40,
        leaking=2,
        share=Estimate(value=0.05, lower=0.0, upper=0.25),
        found={"email": 3, "phone_number": 1},
        leaked={"email": 2},
    ),
)


def test_probes_are_results_of_the_data_that_they_were_made_of() -> None:
    found = results(card(measured={"probes": PROBES}))
    bias, extraction = "Preference for stereotypes, bits a sentence", "Passages extracted verbatim"
    extraction += ", 40 tokens after 50"
    told = {key: each for key, each in found.items() if each.metric_type not in OF_TEXT}
    assert {key: (each.metric_value, each.dataset_type) for key, each in told.items()} == {
        (bias, "gender en"): (0.5, "bias-templates"),
        (bias, "gender ko"): (-0.5, "bias-templates"),
        (extraction, None): (0.06, "training"),
        ("Texts that leak personal data", None): (0.05, "training"),
    }
    assert told[bias, "gender en"].metric_args == {"confidence": 0.95, "lower": 0.25, "upper": 0.75}
    assert told[bias, "gender ko"].metric_args is None
    assert told[extraction, None].dataset_name.startswith("Training documents of ")


def test_a_test_case_of_the_recipe_is_no_held_out_document() -> None:
    found = results(card(measured=MEASURED))["returns (invariance)", None]
    assert (found.dataset_type, found.dataset_name) == (
        "behavioural-tests",
        "Test cases of the recipe",
    )


@pytest.mark.parametrize(
    ("probes", "told", "untold"),
    [
        (
            PROBES,
            (
                "| gender en | en | 12 | 4 | +0.50 | +0.25 to +0.75 |",
                "| gender ko | ko | 2 | 4 | \N{MINUS SIGN}0.50 | \N{EN DASH} |",
                "given 50 tokens, writes the next 40 verbatim",
                "| training | 100 | 6 | 0.060 | 0.030 to 0.110 |",
                "| held out | 0 | 0 | \N{EN DASH} | \N{EN DASH} |",
                "is in the training text: 2 of 3 email, 0 of 1 phone number.",
                "| 40 | 2 | 0.050 | 0.000 to 0.250 |",
                "- The figures on bias come from a few sentences",
            ),
            ("Not measured",),
        ),
        (
            Probes(memorisation=PROBES.memorisation),
            ("- Not measured: bias, leaked personal data.\n- No licence", "### Memorised text"),
            ("### Bias", "The figures on bias", "### Leaked"),
        ),
        (
            Probes(),
            ("- Not measured: bias, memorised training text, leaked personal data.\n",),
            ("### Bias", "The figures on bias", "### Memorised", "### Leaked"),
        ),
    ],
)
def test_users_read_what_was_looked_for_and_what_was_not(
    probes: Probes, told: tuple[str, ...], untold: tuple[str, ...]
) -> None:
    text = card(measured={"probes": probes})
    assert [line for line in told if line not in text] == []
    assert [line for line in untold if line in text] == []
    assert "- What it writes may be wrong, biased or copied from the training data.\n" in text
    assert "Only the figures above were measured" in text


def test_harness_tasks_and_the_served_form_are_on_the_card() -> None:
    scores = (
        HarnessScore(task="colours", metric="acc", value=0.75, stderr=0.0433, documents=100),
        HarnessScore(task="all", metric="acc", value=0.5, stderr=None, documents=None),
    )
    size = served_as_int8(2.5, "f0r4")
    text = card(measured={"harness": scores, "right_size": size})
    assert "| colours: acc | 100 | 0.7500 | 0.0433 |" in text
    assert "| all: acc | \N{EN DASH} | 0.5000 | \N{EN DASH} |" in text
    assert "The weights are served as int8: 2 of 4 GB, +0.0020 bits per byte" in text
    assert "model content `f0r4`" in text
    tasks = [each for each in ModelCard(text).data.eval_results if each.metric_type == "acc"]
    found = {each.dataset_name: (each.metric_value, each.metric_args) for each in tasks}
    assert found == {"colours": (0.75, {"stderr": 0.0433}), "all": (0.5, None)}


def test_the_card_says_what_the_gate_found() -> None:
    change = SliceChange(
        slice=Slice(dimension="source", name="a|b"),
        documents=20,
        candidate_bits_per_byte=2.4,
        champion_bits_per_byte=2.6,
        improvement=Estimate(value=0.2, lower=0.1, upper=0.3),
        regressed=False,
    )
    verdict = Verdict(
        decision="promoted",
        reason="better on a|b",
        candidate_bits_per_byte=2.5,
        champion_bits_per_byte=2.75,
        comparison=Comparison(
            documents=40,
            better_on=30,
            improvement=Estimate(value=0.25, lower=None, upper=None),
            confidence=0.95,
            resamples=100,
            slice_confidence=0.975,
            slices=(change,),
        ),
    )
    text = card(verdict=verdict)
    assert "Promoted: better on a\\|b." in text
    assert "| all | 40 | 2.7500 | 2.5000 | +0.2500 | \N{EN DASH} |" in text
    assert "| source a\\|b | 20 | 2.6000 | 2.4000 | +0.2000 | +0.1000 to +0.3000 |" in text
