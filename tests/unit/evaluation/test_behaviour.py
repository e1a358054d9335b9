"""Each kind of test, against likelihoods taken one token at a time."""

import math
from pathlib import Path

import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.data.tokens.tokenizer import byte_tokenizer, save_tokenizer
from pipelines.evaluation.behaviour import run_tests
from pipelines.models.presets import preset
from pipelines.models.pretrained import load_pretrained, save_pretrained
from pipelines.models.transformer import Transformer
from pipelines.recipe.evaluation_section import Behaviour
from pipelines.recipe.recipe_files import parse_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level model with random weights, large enough that likelihoods differ."""
    path = tmp_path_factory.mktemp("model")
    model = Transformer(preset("llama-100k").sized(257, 64))
    model.init_weights(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    save_pretrained(model, path, end_of_text=256)
    save_tokenizer(byte_tokenizer(), path)
    return path


def bits_of(folder: Path, prompt: str, continuation: str) -> float:
    """What each byte of the continuation takes, with all before it as context."""
    model = load_pretrained(folder).eval()
    start = len(prompt.encode())
    ids = [256, *(prompt + continuation).encode()]
    with torch.inference_mode():
        logits = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    nats = [-logits[place, ids[place + 1]].item() for place in range(start, len(ids) - 1)]
    return sum(nats) / math.log(2)


def passed(folder: Path, kind: str, *cases: dict[str, str], **options: object) -> int:
    test = Behaviour.model_validate({"name": "t", "kind": kind, "cases": cases, **options})
    (score,) = run_tests(folder, [test])
    assert (score.name, score.kind, score.cases) == ("t", kind, len(cases))
    return score.passed


PAIRS = [("print(", ")", "]"), ("été ", "à la mer", "in"), ("x", "y", "é")]


@pytest.mark.parametrize(("prompt", "one", "other"), PAIRS)
def test_the_right_continuation_is_the_likelier(
    folder: Path, prompt: str, one: str, other: str
) -> None:
    likelier = bits_of(folder, prompt, one) < bits_of(folder, prompt, other)
    case = {"prompt": prompt, "continuation": one, "wrong": other}
    swapped = {"prompt": prompt, "continuation": other, "wrong": one}
    assert passed(folder, "minimum_functionality", case) == likelier
    assert passed(folder, "minimum_functionality", swapped) == (not likelier)
    assert passed(folder, "minimum_functionality", case, swapped, case) in (1, 2)
    tie = {"prompt": prompt, "continuation": one, "wrong": one}
    assert passed(folder, "minimum_functionality", tie) == 0


@pytest.mark.parametrize(("prompt", "changed", "continuation"), PAIRS)
def test_a_change_moves_the_likelihood_no_further_than_said(
    folder: Path, prompt: str, changed: str, continuation: str
) -> None:
    case = {"prompt": prompt, "changed": changed, "continuation": continuation}
    moved = abs(bits_of(folder, prompt, continuation) - bits_of(folder, changed, continuation))
    assert passed(folder, "invariance", case, max_bits=moved + 1e-3) == 1
    assert passed(folder, "invariance", case, max_bits=moved - 1e-3) == 0


@pytest.mark.parametrize(("prompt", "changed", "continuation"), PAIRS)
def test_a_change_moves_the_likelihood_as_said(
    folder: Path, prompt: str, changed: str, continuation: str
) -> None:
    case = {"prompt": prompt, "changed": changed, "continuation": continuation}
    up = bits_of(folder, changed, continuation) < bits_of(folder, prompt, continuation)
    assert passed(folder, "directional", case, direction="up") == up
    assert passed(folder, "directional", case, direction="down") == (not up)


def test_no_tests_load_no_model() -> None:
    assert run_tests(Path("/nowhere"), []) == ()


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (
            [{"name": "a", "kind": "invariance", "cases": [{"prompt": "p", "continuation": "c"}]}],
            "test `a`, case 1: the kind invariance needs `changed` and no `wrong`",
        ),
        (
            2
            * [
                {
                    "name": "a",
                    "kind": "minimum_functionality",
                    "cases": [{"prompt": "p", "continuation": "c", "wrong": "d"}],
                }
            ],
            "two tests are named a",
        ),
        ([{"name": "a", "kind": "invariance", "cases": []}], "at least 1 item"),
        ([{"name": "a", "kind": "other", "cases": []}], "'minimum_functionality', 'invariance'"),
    ],
)
def test_what_is_wrong_with_a_test_is_one_line(tests: list[object], said: str) -> None:
    with pytest.raises(UserError, match=r"evaluate\.behaviour") as raised:
        parse_recipe({"name": "r", "evaluate": {"behaviour": tests}})
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
