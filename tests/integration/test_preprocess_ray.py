import json
from pathlib import Path

import pytest

from pipelines.core.errors import UserError
from pipelines.core.recipe import Recipe
from pipelines.core.storage import folder_hash
from pipelines.data import readers
from pipelines.stages.preprocess import run
from ray_jobs.ray_map import map_on_ray

pytestmark = pytest.mark.usefixtures("ray_cluster")


def recipe(path: Path, tokenizer: str = "bpe") -> Recipe:
    return Recipe.model_validate(
        {
            "name": "test",
            "data": {
                "source": {"kind": "files", "path": str(path)},
                "tokenizer": {"kind": tokenizer, "vocab_size": 400},
                "sequence_length": 16,
            },
        }
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    texts = [
        f"{number} Fischers Fritz 日本語 😀\r\n " * (number % 50 + 1) for number in range(3000)
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_results_come_in_order() -> None:
    assert list(map_on_ray(str, range(40))) == [str(number) for number in range(40)]
    assert list(map_on_ray(str, [])) == []


def test_a_persons_mistake_comes_back_as_itself() -> None:
    def refuse(number: int) -> int:
        if number == 3:
            raise UserError("a.txt: mend it")
        return number

    with pytest.raises(UserError, match=r"^a\.txt: mend it$"):
        list(map_on_ray(refuse, range(6)))


@pytest.mark.parametrize("tokenizer", ["bpe", "char"])
def test_outputs_are_the_same_bytes_as_in_process(
    corpus: Path, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    run(recipe(corpus, tokenizer), here)
    monkeypatch.setattr(readers, "BATCH_BYTES", 300_000)  # other tasks, the same documents
    run(recipe(corpus, tokenizer), there, map_on_ray)
    assert folder_hash(here / "outputs") == folder_hash(there / "outputs")
