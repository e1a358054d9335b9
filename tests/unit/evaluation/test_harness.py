"""lm-evaluation-harness itself, on a small model and a task that lies beside this file."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelines.core.errors import UserError
from pipelines.evaluation import harness
from pipelines.evaluation.harness import Found, read_task, run_harness
from pipelines.export.quantized import export_quantized
from pipelines.recipe.recipe import Harness, Recipe
from pipelines.recipe.recipe_files import with_absolute_paths
from pipelines.stage_cache.open_workspace import environment
from pipelines.stages.evaluate import evaluation
from tests.unit.export.models import small, write_registered
from tests.unit.stages.evaluate.test_evaluation import make_workspace, recipe

TASKS = Path(__file__).parent / "tasks"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_registered(small(), tmp_path_factory.mktemp("model"))


@pytest.fixture
def evaluate_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What the process of its own does, in this one: its imports take long."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def here(model: Path, **wanted: Any) -> Found:
        return harness._evaluate({"model": str(model), "wanted": wanted, "chat": False})

    return here


@torch.no_grad()
def right_answers(model: Path) -> list[bool]:
    """By plain transformers: is the likeliest continuation the right one?"""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    right = []
    for line in (TASKS / "numbers.jsonl").read_text().splitlines():
        row = json.loads(line)
        context, sums = row["question"].encode(), []
        for choice in row["choices"]:
            ids = torch.tensor([[*context, *f" {choice}".encode()]])
            scores = loaded(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
            sums.append(scores[len(context) - 1 :].sum().item())
        right.append(sums.index(max(sums)) == row["answer"])
    return right


def test_scores_are_those_of_the_likeliest_choices(model: Path) -> None:
    right = right_answers(model)
    share = sum(right) / len(right)
    assert 0 < share < 1
    wanted = Harness(files=(str(TASKS / "numbers.yaml"),))
    found = run_harness(model, wanted, chat=False)
    scores = {each.metric: each for each in found.scores}
    acc = scores["acc"]
    assert (acc.task, acc.documents, acc.higher_is_better) == ("numbers", 12, True)
    assert acc.value == pytest.approx(share)
    assert acc.stderr == pytest.approx(math.sqrt(share * (1 - share) / 11))
    assert 0 < scores["brier_score"].value < 2
    # Of the Brier score less is better.
    rows = [row for row in found.rows if row.task == "numbers/acc"]
    assert [row.value for row in sorted(rows, key=lambda row: int(row.question))] == right
    assert not any(row.task == "numbers/brier_score" for row in found.rows)


def test_a_quantised_folder_is_put_to_tasks_as_it_is_served(
    model: Path, tmp_path: Path, evaluate_here: Callable[..., Any]
) -> None:
    folder = tmp_path / "int4"
    folder.mkdir()
    export_quantized(model, folder, 4, 32)
    found = evaluate_here(folder, files=[str(TASKS / "numbers.yaml")], limit=4)
    assert {each.documents for each in found.scores} == {4}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"task: numbers": "name: numbers"}, "no `task:` key with a name"),
        ({"numbers.jsonl": "../numbers.jsonl"}, "../numbers.jsonl is not a file beside it"),
        ({"dataset_path: json": "dataset_path: someone/else"}, "must have its data beside it"),
        ({"{test:": "{{test:"}, "while parsing"),
    ],
)
def test_a_wrong_task_file_is_one_line(change: dict[str, str], line: str, tmp_path: Path) -> None:
    folder = tmp_path / "task"
    shutil.copytree(TASKS, folder)
    text = (folder / "numbers.yaml").read_text()
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "numbers.yaml").write_text(text)
    with pytest.raises(UserError, match=line) as caught:
        read_task(folder / "numbers.yaml")
    assert "\n" not in str(caught.value)


def test_what_a_template_wants_and_the_data_lack_is_one_line(
    model: Path, tmp_path: Path, evaluate_here: Callable[..., Any]
) -> None:
    shutil.copytree(TASKS, tmp_path / "task")
    path = tmp_path / "task" / "numbers.yaml"
    path.write_text(path.read_text().replace("{{question}}", "{{query}}"))
    with pytest.raises(UserError, match="'query' is undefined"):
        evaluate_here(model, files=[str(path)])


def test_what_is_refused_there_is_one_line_here(model: Path, tmp_path: Path) -> None:
    wanted = Harness(files=(str(tmp_path / "none.yaml"),))
    with pytest.raises(
        UserError, match=r"evaluate\.harness: .*none\.yaml: .*No such file"
    ) as caught:
        run_harness(model, wanted, chat=False)
    assert "\n" not in str(caught.value)


def test_a_task_that_the_harness_does_not_have_is_one_line(
    model: Path, evaluate_here: Callable[..., Any]
) -> None:
    with pytest.raises(UserError, match="no_such_task"):
        evaluate_here(model, tasks=["no_such_task"])


def test_in_the_stage_they_are_run_on_the_model_and_become_metrics(
    tmp_path: Path, evaluate_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: Path, wanted: Harness, *, chat: bool) -> Found:
        assert not chat
        found: Found = evaluate_here(folder, **wanted.model_dump(mode="json"))
        return found

    monkeypatch.setattr(harness, "run_harness", run)
    files = {"files": [str(TASKS / "numbers.yaml")], "limit": 4}
    asked = recipe(sample_tokens=0, prompts=[], harness=files)
    record = evaluation.run(asked, make_workspace(tmp_path / "workspace"))
    found = {each.metric: each for each in record.harness}
    assert (found["acc"].task, found["acc"].documents) == ("numbers", 4)
    metrics = evaluation._harness_metrics(record)
    assert metrics["harness/numbers/acc"] == found["acc"].value
    assert metrics["harness/numbers/acc_stderr"] == found["acc"].stderr


def test_the_stage_cache_sees_a_change_of_the_tasks_data(tmp_path: Path) -> None:
    shutil.copytree(TASKS, tmp_path / "task")
    (tmp_path / "requirements.lock").write_text("a==1\n")
    harness = {"files": ["task/numbers.yaml"]}
    recipe = Recipe.model_validate({"name": "r", "evaluate": {"harness": harness}})
    absolute = with_absolute_paths(recipe, tmp_path)
    assert absolute.evaluate.harness.files == (str(tmp_path / "task" / "numbers.yaml"),)
    before = environment(tmp_path, absolute)
    (tmp_path / "task" / "numbers.jsonl").open("a").write("{}\n")
    after = environment(tmp_path, absolute)
    assert {key for key in before if before[key] != after[key]} == {"tasks"}
    with pytest.raises(UserError, match=r"elsewhere/task/numbers\.yaml: no such file"):
        environment(tmp_path, with_absolute_paths(recipe, tmp_path / "elsewhere"))
