import pytest

from pipelines.core.recipe import Recipe
from pipelines.core.records import (
    DatasetRef,
    EvaluateRecord,
    PreprocessRecord,
    Split,
    TrainRecord,
)
from pipelines.export.model_card import model_card


def card(**sections: object) -> str:
    recipe = Recipe.model_validate({"name": "small", **sections})
    split = Split(documents=2, bytes=50, tokens=50, shards=())
    dataset = DatasetRef(vocab_size=257, train=split, validation=split)
    train = TrainRecord(
        model="model", model_hash="abc", parameters=1234, steps=5, tokens=60, metrics={}
    )
    evaluate = EvaluateRecord(
        bits_per_byte=2.5,
        perplexity=9.0,
        documents=2,
        bytes=50,
        data_hash="def",
        baselines={"xz": 3.0},
        samples=(),
    )
    return model_card(
        recipe, PreprocessRecord(dataset=dataset, stats={}), train, evaluate, {}, "llama"
    )


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({}, "(5 steps, 60 tokens).\n"),
        ({}, "it follows no instructions"),
        ({"model": {"init_from": "/far/away/base"}}, "started from `base`.\n"),
        (
            {"model": {"init_from": "base"}, "adapter": {"kind": "qlora"}},
            "started from `base`, whose weights\nQLoRA left as they were",
        ),
        ({"data": {"instruction": {"kind": "messages"}}}, "by the tokenizer's chat template"),
    ],
)
def test_it_says_where_the_weights_come_from_and_what_they_are_for(
    sections: dict[str, object], line: str
) -> None:
    assert line in card(**sections)
