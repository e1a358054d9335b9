"""What documents are filed under, and which slices are made of it."""

import pyarrow as pa
import pytest

from pipelines.evaluation.held_out_documents import UNCERTAIN, source_labels, with_labels
from pipelines.evaluation.slices import score_slices, slices_of


def documents(*sources):
    return pa.table({"doc_id": [str(number) for number in range(len(sources))], "source": sources})


@pytest.mark.parametrize(
    ("source", "label"),
    [
        ("json/decoder.py", "json"),
        ("abc.py", "abc.py"),
        ("train.jsonl:12", "train.jsonl"),
        ("web/part-3.jsonl.gz:7", "web"),
        ("train", "train"),
    ],
)
def test_a_source_is_a_folder_or_a_file(source, label):
    assert source_labels(documents(source), {}) == [label]


def test_of_a_mixture_it_is_the_dataset():
    table = documents("a.py", "b.py", "c.py")
    found = source_labels(table, {"x@1": table.slice(0, 2), "y@2": table.slice(1)})
    assert found == ["x@1", "x@1", "y@2"]


def test_languages_and_lengths():
    english = "The quick brown fox jumps over the lazy dog, and nobody in the village minds it. "
    korean = "오늘은 날씨가 맑아서 산책을 나갔습니다. 공원에는 사람이 많았습니다. "
    texts = [english, korean * 60, "x1 = 0x3f\n", english * 1000]
    table = pa.table({"source": list("abcd"), "text": texts})
    sizes = [len(text.encode()) for text in texts]
    found = with_labels(pa.table({"bytes": sizes}), table)
    assert found["source"].to_pylist() == list("abcd")
    assert found["language"].to_pylist() == ["en", "ko", UNCERTAIN, "en"]
    assert found["length"].to_pylist() == [
        "under 1 KiB", "4 to 16 KiB", "under 1 KiB", "64 KiB and more",
    ]  # fmt: skip


def test_slices_are_the_largest_and_the_rest():
    languages = ["ko"] * 20 + ["en"] * 30 + ["de"] * 19 + ["fr"]
    found = slices_of(pa.table({"language": languages, "length": ["short"] * 70}))
    assert [str(name) for name in found.names] == ["language en", "language ko", "language other"]
    assert found.members.sum(axis=0).tolist() == [30, 20, 20]
    assert (found.members.sum(axis=1) == 1).all()


def test_a_rest_that_is_small_is_none_and_one_slice_alone_too():
    assert slices_of(pa.table({"language": ["ko"] * 20 + ["en"] * 19})).names == ()
    assert slices_of(pa.table({"bytes": [1] * 100})).names == ()


def test_there_are_not_many():
    sources = [f"{number % 40:02d}" for number in range(40 * 25)]
    found = slices_of(pa.table({"source": sources}))
    assert len(found.names) == 17
    assert found.members[:, -1].sum() == 24 * 25


def test_scores_of_few_documents_have_no_interval():
    table = pa.table({"bytes": [10, 20], "nats": [1.0, 2.0]})
    total, slices = score_slices(table, 0.975)
    assert (total.lower, total.upper, slices) == (None, None, ())
