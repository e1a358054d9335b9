"""Which answers count as right, and that the questions asked are held-out ones."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.data.tokens.chat_encoder import make_chat_tokenizer
from pipelines.data.tokens.tokenizer import byte_tokenizer, save_tokenizer
from pipelines.evaluation.exact_match import (
    Answer,
    Question,
    answer_questions,
    find_questions,
    score_answers,
)
from pipelines.evaluation.extracted_answer import extract_answer
from pipelines.models.presets import preset
from pipelines.models.pretrained import save_pretrained
from pipelines.models.transformer import Transformer
from pipelines.recipe.data_section import Instruction
from pipelines.recipe.recipe import Questions
from pipelines.recipe.recipe_files import parse_recipe

GSM8K = Questions().pattern


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 * 14 = <<3*14=42>>42\n#### 42", "42"),
        ("#### 41\nNo:\n#### 42.00 \n", "42"),
        ("#### $1,000", "1000"),
        ("####-3.50", "-3.5"),
        ("#### 7%.", "7"),
        ("#### NaN", "NaN"),
        ("#### Paris", "Paris"),
        ("#### .50", "0.5"),
        ("#### -0", "0"),
        ("#### 007", "7"),
        ("#### 12345678901234567890123456789012.0", "12345678901234567890123456789012"),
        ("#### 1e999999999", "1e999999999"),
        ("#### 5 or 6", "5 or 6"),
        ("#### -", "-"),
        ("forty-two", None),
        ("#### ", None),
    ],
)
def test_what_counts_of_an_answer(text, answer):
    assert extract_answer(text, GSM8K) == answer


def test_a_pattern_without_a_group_counts_whole():
    assert extract_answer("first A, then B", "[AB]") == "B"


def documents(*talks):
    return pa.table(
        {
            "doc_id": [str(number) for number in range(len(talks))],
            "text": ["" for _ in talks],
            "messages": pa.array(
                [json.dumps(talk) if talk else None for talk in talks], pa.string()
            ),
        }
    )


def test_questions_are_the_first_that_have_one_answer():
    talks = [
        (("user", "How many?"), ("assistant", "Four.\n#### 4")),
        (),  # a plain text
        (("user", "Why?"), ("assistant", "Because.")),
        (("user", "a"), ("assistant", "#### 1"), ("user", "b"), ("assistant", "#### 2")),
        (("user", "And now?"), ("assistant", "#### 5,000")),
        (("user", "Last?"), ("assistant", "#### 6")),
    ]
    found = find_questions(documents(*talks), GSM8K, 2)
    assert found == [Question("How many?", "4"), Question("And now?", "5000")]
    assert find_questions(documents(*talks), GSM8K, 0) == []
    plain = pa.table({"doc_id": ["0"], "text": ["#### 4"]})
    assert find_questions(plain, GSM8K, 5) == []


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    """A chat model that answers everything with sevens."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(byte_tokenizer(), folder)
    make_chat_tokenizer(folder, Instruction(kind="messages"))
    shape = replace(preset("gpt-j-6b"), layers=1, width=32, heads=2, kv_heads=2, hidden=32)
    model = Transformer(shape.sized(259, 128))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.lm_head.bias[ord("7")] = 9.0
    save_pretrained(model, folder, end_of_text=256)
    return folder


def test_a_models_answers_are_compared(parrot):
    questions = [Question("How many?", "777"), Question("And now?", "5")]
    right, wrong = answer_questions(parrot, questions, r"7+", 3)
    assert right == Answer("How many?", "777", "777", "777", True)
    assert wrong == Answer("And now?", "5", "777", "777", False)
    assert answer_questions(parrot, questions[:1], GSM8K, 3)[0].found is None


def test_shares_have_wilsons_interval():
    def scored(right, count):
        answers = [Answer("q", "1", "", "1", number < right) for number in range(count)]
        share = score_answers(answers, 0.975).share
        return [round(each, 4) for each in (share.lower, share.value, share.upper)]

    # statsmodels' proportion_confint(method="wilson") and the closed form at the ends
    assert scored(5, 10) == [0.2366, 0.5, 0.7634]
    assert scored(0, 10) == [0.0, 0.0, 0.2775]
    assert scored(10, 10) == [0.7225, 1.0, 1.0]
    assert score_answers([], 0.975) is None


def test_a_broken_pattern_is_one_line():
    with pytest.raises(UserError, match=r"evaluate\.questions\.pattern.*not a regular expression"):
        parse_recipe({"name": "r", "evaluate": {"questions": {"pattern": "(("}}})
