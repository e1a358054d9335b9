import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.core.errors import UserError
from pipelines.data.normalize import Document
from pipelines.data.reading import hub_datasets
from pipelines.data.reading.instruction import Fields
from pipelines.data.reading.sources import fingerprint, list_inputs
from pipelines.data.reading.text_readers import plan_reads, read_batch
from pipelines.recipe.data_section import Instruction, Source

TALK = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}]


def hub(path: Path | str, **fields: Any) -> Source:
    return Source(kind="huggingface", path=str(path), **fields)


def read(source: Source, fields: Fields | None = None) -> list[Document]:
    plan = plan_reads(source, list_inputs(source))
    return [found for batch in plan for found in read_batch(batch, fields or Fields())]


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """A dataset as it lies on the hub: three files of one split, one of another."""
    folder = tmp_path / "a dataset"
    folder.mkdir()
    for shard in range(3):
        table = pa.table({"text": [f"{shard}.{row}" for row in range(300)], "id": range(300)})
        pq.write_table(table, folder / f"train-{shard:05d}-of-00003.parquet")
    pq.write_table(pa.table({"text": ["held out"]}), folder / "test-00000-of-00001.parquet")
    return folder


def test_the_files_of_a_split_are_read_in_order_each_on_its_own(parquet: Path) -> None:
    documents = read(hub(parquet))
    assert [found.text for found in documents] == [
        f"{shard}.{row}" for shard in range(3) for row in range(300)
    ]
    assert documents[301].source == "train/1:2"
    assert read(hub(f"file://{parquet}")) == documents
    assert len(plan_reads(hub(parquet), list_inputs(hub(parquet)), batch_bytes=1)) == 3
    assert [found.text for found in read(hub(parquet, split="test"))] == ["held out"]


def test_jsonl_is_read_too(tmp_path: Path) -> None:
    lines = [json.dumps({"messages": TALK}), json.dumps({"messages": TALK[:1]})]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    fields = Fields(instruction=Instruction(kind="messages"))
    first, second = read(hub(tmp_path), fields)
    assert first.messages == (("user", "ask"), ("assistant", "answer"))
    assert second.detail == "no message has the role 'assistant'"
    with pytest.raises(UserError, match=r"set data\.instruction\.kind to messages"):
        read(hub(tmp_path))


def test_what_save_to_disk_wrote_is_read_by_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_datasets, "SHARD_ROWS", 4)
    texts = [f"text {row}" for row in range(10)]
    whole = datasets.Dataset.from_dict({"text": texts, "id": list(range(10))})
    whole.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": whole}).save_to_disk(tmp_path / "split")
    for folder in (tmp_path / "one", tmp_path / "split"):
        source = hub(folder)
        assert len(plan_reads(source, list_inputs(source), batch_bytes=1)) == 3
        documents = read(source)
        assert [found.text for found in documents] == texts
        assert documents[9].source == "train:10"


def test_the_fingerprint_follows_the_files(parquet: Path) -> None:
    before = fingerprint(hub(parquet))
    assert len(before["inputs"]) == 4
    pq.write_table(pa.table({"text": ["other"]}), parquet / "test-00000-of-00001.parquet")
    assert fingerprint(hub(parquet)) != before


def test_nothing_there_is_one_line(parquet: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    datasets.DatasetDict({"a": datasets.Dataset.from_dict({"text": ["x"]})}).save_to_disk(
        tmp_path / "saved"
    )
    for source, problem in (
        (hub(parquet, split="dev"), "Bad split: dev"),
        (hub(tmp_path / "saved"), "no split 'train' among a; set data.source.split"),
        (hub(tmp_path / "empty"), "the folder holds no file"),
        (hub(tmp_path / "no such folder"), "neither a folder nor a dataset of the hub"),
    ):
        with pytest.raises(UserError) as raised:
            read(source)
        assert problem in str(raised.value)
        assert "\n" not in str(raised.value)
