from pathlib import Path

import pytest

from pipelines.core.storage import read_json
from pipelines.data import passes
from pipelines.data.documents import DocumentWriter
from pipelines.data.normalize import document
from pipelines.data.passes import map_in_process
from pipelines.data.tokens import tokenization
from pipelines.data.tokens.tokenization import (
    characters,
    make_tokenizer,
    plan_text_blocks,
    sample_texts,
)
from pipelines.recipe.data_section import Data
from pipelines.run.progress import ProgressWriter


def write(path: Path, texts: list[str]) -> Path:
    with DocumentWriter(path) as writer:
        for number, text in enumerate(texts):
            writer.add(document(f"{number}.txt", text))
    return path


def test_blocks_are_whole_row_groups_of_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "LEAST_BLOCK_BYTES", 3 << 20)
    paths = [
        write(tmp_path / name, [f"{name} {number} " + "x" * (1 << 20) for number in range(4)])
        for name in ("a", "b")
    ]
    blocks = plan_text_blocks(paths)
    assert [len(block.groups) for block in blocks] == [2, 2, 2, 2]
    assert [group.path for block in blocks for group in block.groups] == [
        path for path in paths for _ in range(4)
    ]


def test_a_sample_is_a_share_of_the_documents_and_always_the_same(tmp_path: Path) -> None:
    (block,) = plan_text_blocks(
        [write(tmp_path / "a", [f"text {number}" for number in range(2000)])]
    )
    sample = sample_texts(block, tmp_path, fraction=0.25)
    assert 400 < len(sample) < 600
    assert sample == sample_texts(block, tmp_path, fraction=0.25)
    assert len(sample_texts(block, tmp_path, fraction=1.5)) == 2000
    assert sample_texts(block, tmp_path, fraction=0) == ["text 0"]


def test_a_sample_holds_documents_of_so_many_blocks_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "LEAST_BLOCK_BYTES", 1)
    monkeypatch.setattr(tokenization, "_SAMPLED_BLOCKS", 3)
    monkeypatch.setattr(tokenization, "BPE_SAMPLE_BYTES", 1)
    paths = [write(tmp_path / f"{number}.parquet", [f"text {number}"]) for number in range(8)]
    work = passes.Passes(tmp_path, map_in_process, lambda: ProgressWriter(tmp_path, "test"))
    make_tokenizer(Data(), tmp_path / "tokenizer", paths, [], work)
    results = sorted(tmp_path.glob(f"sample/*/{passes.RESULT}"))
    assert [read_json(path) for path in results] == [["text 0"], ["text 3"], ["text 6"]]


def test_characters(tmp_path: Path) -> None:
    (block,) = plan_text_blocks([write(tmp_path / "a", ["abba", "été"])])
    assert characters(block, tmp_path) == "abté"
