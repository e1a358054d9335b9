from pathlib import Path

import numpy as np
import pytest

from pipelines.core.storage import read_json
from pipelines.data import passes
from pipelines.data.documents import DocumentWriter
from pipelines.data.normalize import document
from pipelines.data.passes import map_in_process
from pipelines.data.reading.instruction import Fields, record_document
from pipelines.data.tokens import tokenization
from pipelines.data.tokens.chat_encoder import make_chat_tokenizer
from pipelines.data.tokens.tokenization import (
    IDS_FILE,
    MASK_FILE,
    SIZES_FILE,
    characters,
    make_tokenizer,
    plan_text_blocks,
    sample_texts,
    tokenize_conversations,
)
from pipelines.data.tokens.tokenizer import byte_tokenizer, save_tokenizer
from pipelines.recipe.data_section import Data, Instruction
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


def test_of_a_pair_only_what_differs_is_predicted_in_both(tmp_path: Path) -> None:
    save_tokenizer(byte_tokenizer(), tmp_path / "tokenizer")
    asked = Instruction(kind="preference")
    make_chat_tokenizer(tmp_path / "tokenizer", asked)
    ends = {"chosen": "Yes, it is.", "rejected": "Yes"}, {"chosen": "long" * 50, "rejected": "no"}
    path = tmp_path / "documents.parquet"
    before = [("user", "Hi"), ("assistant", "Yes?"), ("user", "Is it?")]
    with DocumentWriter(path) as documents:
        for each in ends:
            record = {
                name: [
                    {"role": role, "content": content}
                    for role, content in [*before, ("assistant", answer)]
                ]
                for name, answer in each.items()
            }
            documents.add(record_document("a:1", 0, record, Fields(instruction=asked)))
    (block,) = plan_text_blocks([path])
    options = {"tokenizer": tmp_path / "tokenizer", "tokenizer_hash": "1"}
    total = tokenize_conversations(block, tmp_path, **options, capacity=200)
    start, stop, end = 257, 258, 256  # of ChatML's marks, and of a document
    ids, mask, sizes = [], [], []
    for answer in ends[0].values():  # the second pair is longer than a sample
        given = [
            token
            for role, content in before
            for token in [start, *f"{role}\n{content}".encode(), stop, *b"\n"]
        ]
        given += [start, *b"assistant\n"]
        said = [*answer.encode(), stop, *b"\n", end]
        ids += given + said
        mask += [0] * len(given) + [1] * len(said)
        sizes.append(len(given + said))
    assert np.fromfile(tmp_path / IDS_FILE, "<u2").tolist() == ids
    assert np.fromfile(tmp_path / MASK_FILE, np.uint8).tolist() == mask
    assert np.load(tmp_path / SIZES_FILE).tolist() == sizes
    assert total == len(ids)
