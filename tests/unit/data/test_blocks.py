"""Pass 1 and 3: from an input file to the documents of each split."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipelines.core.errors import UserError
from pipelines.data.blocks import DOCUMENTS_FILE, extract
from pipelines.data.cleaning.cleaner import gather_ngrams
from pipelines.data.documents import load_messages
from pipelines.data.duplicates.deduplication import join, match
from pipelines.data.reading.sources import list_inputs
from pipelines.data.reading.text_readers import plan_reads
from pipelines.data.selection import Part, Selected, misplaced, part_files, plan_parts, select
from pipelines.data.tally import Tally
from pipelines.recipe.data_section import Data
from pipelines.run.records import SPLITS, TRAIN, VALIDATION

QUIZ = "the quick brown fox jumps over the lazy dog while seven wizards quietly brew nine potions"


def write(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def texts(path: Path) -> list[str]:
    return list(pq.read_table(path)["text"].to_pylist())


def read(
    folder: Path, records: Sequence[Any], limit: int | None = None, **sections: Any
) -> tuple[Path, Tally]:
    """A block of the records, extracted."""
    source = {"kind": "files", "path": str(write(folder / "corpus.jsonl", records))}
    data = Data.model_validate({"source": source, **sections})
    sets = []
    for number, path in enumerate(data.decontamination.against):
        (folder / f"set-{number}").mkdir()
        gather_ngrams(path, folder / f"set-{number}", data=data)
        sets.append((Path(path).name, folder / f"set-{number}"))
    (folder / "block").mkdir()
    (block,) = plan_reads(data.source, list_inputs(data.source))
    return folder / "block", extract(
        block, folder / "block", data=data, evaluation_sets=tuple(sets), limit=limit
    )


def test_a_filter_drops_with_its_reason_and_a_sample(tmp_path: Path) -> None:
    records = [{"text": "short"}, {"text": "long enough to stay"}]
    block, tally = read(
        tmp_path, records, filters={"length": {"enabled": True, "min_characters": 10}}
    )
    assert texts(block / DOCUMENTS_FILE) == ["long enough to stay"]
    assert tally.dropped == {"length:too_short": 1}
    assert tally.rejects["length:too_short"][0]._asdict() == {
        "source": "corpus.jsonl:1",
        "excerpt": "short",
    }


def test_no_sample_shows_personal_data(tmp_path: Path) -> None:
    """Even where nothing else is done about it, and where the excerpt's end cuts through it."""
    records = [{"text": "a" * gap + " mail jane.roe@corp.net"} for gap in (0, 185, 190, 198)]
    _, tally = read(
        tmp_path, records, filters={"length": {"enabled": True, "min_characters": 1000}}
    )
    samples = tally.rejects["length:too_short"]
    assert len(samples) == 4
    for sample in samples:
        assert "jane" not in sample.excerpt
        assert len(sample.excerpt) <= 200
    assert samples[0].excerpt == " mail <EMAIL>"


@pytest.mark.parametrize(
    ("action", "kept"),
    [
        ("off", ["write to jane.roe@corp.net", "clean"]),
        ("report", ["write to jane.roe@corp.net", "clean"]),
        ("mask", ["write to <EMAIL>", "clean"]),
        ("drop", ["clean"]),
    ],
)
def test_personal_data(tmp_path: Path, action: str, kept: list[str]) -> None:
    records = [{"text": "write to jane.roe@corp.net"}, {"text": "clean"}]
    block, tally = read(tmp_path, records, pii={"action": action})
    assert texts(block / DOCUMENTS_FILE) == kept
    assert tally.pii == ({} if action == "off" else {"email": 1})
    assert tally.dropped == ({"pii": 1} if action == "drop" else {})
    # The id is that of the text as it is kept.
    table = pq.read_table(block / DOCUMENTS_FILE)
    assert table["bytes"].to_pylist() == [len(text) for text in kept]


def test_a_conversation_is_masked_turn_by_turn(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "I am jane.roe@corp.net"},
        {"role": "assistant", "content": "Hello"},
    ]
    block, _ = read(
        tmp_path,
        [{"messages": turns}],
        pii={"action": "mask"},
        instruction={"kind": "messages"},
    )
    (row,) = pq.read_table(block / DOCUMENTS_FILE).to_pylist()
    assert load_messages(row["messages"]) == (("user", "I am <EMAIL>"), ("assistant", "Hello"))
    assert row["text"] == "I am <EMAIL>\n\nHello"


def pair(asked: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": asked, "chosen": chosen, "rejected": rejected}


PAIRS: dict[str, Any] = {
    "instruction": {"kind": "preference"},
    "packing": "best_fit",
    "document_mask": True,
}


def test_both_conversations_of_a_pair_are_masked(tmp_path: Path) -> None:
    asked = "I am jane.roe@corp.net"
    records = [
        pair(asked, "Hello", "Hello jane.roe@corp.net"),
        pair("Who?", "a.b@corp.net", "c.d@corp.net"),  # nothing is left that tells them apart
    ]
    block, tally = read(tmp_path, records, pii={"action": "mask"}, **PAIRS)
    (row,) = pq.read_table(block / DOCUMENTS_FILE).to_pylist()
    assert load_messages(row["messages"]) == (("user", "I am <EMAIL>"), ("assistant", "Hello"))
    assert load_messages(row["rejected"]) == (
        ("user", "I am <EMAIL>"),
        ("assistant", "Hello <EMAIL>"),
    )
    assert row["text"] == "I am <EMAIL>\n\nHello\n\nHello <EMAIL>"
    assert (tally.pii, tally.dropped) == ({"email": 4}, {"pii": 1})
    assert "corp" not in tally.rejects["pii"][0].excerpt


def test_a_labelled_answer_is_masked_on_either_side(tmp_path: Path) -> None:
    asked = "I am jane.roe@corp.net"
    records = [
        {"prompt": asked, "response": f"Hello {name}, jane.roe@corp.net", "label": label}
        for name, label in (("J", True), ("Jane", False))
    ]
    settings = PAIRS | {"instruction": {"kind": "labelled"}}
    block, _ = read(tmp_path, records, pii={"action": "mask"}, **settings)
    prompt = ("user", "I am <EMAIL>")
    assert [
        (load_messages(row["messages"]), load_messages(row["rejected"]))
        for row in pq.read_table(block / DOCUMENTS_FILE).to_pylist()
    ] == [
        ((prompt, ("assistant", "Hello J, <EMAIL>")), (prompt,)),
        ((prompt,), (prompt, ("assistant", "Hello Jane, <EMAIL>"))),
    ]


def test_a_rejected_answer_is_filtered_and_decontaminated_too(tmp_path: Path) -> None:
    quiz = write(tmp_path / "quiz.jsonl", [pair(QUIZ, "yes", "no")])
    records = [pair("a", "b", QUIZ), pair("c", "d", "e"), pair("f", "g", "g")]
    block, tally = read(tmp_path, records, decontamination={"against": [str(quiz)]}, **PAIRS)
    assert texts(block / DOCUMENTS_FILE) == ["c\n\nd\n\ne"]
    assert tally.dropped == {"contaminated:quiz.jsonl": 1, "malformed": 1}


def test_text_of_an_evaluation_set_is_dropped_and_counted(tmp_path: Path) -> None:
    evaluation = write(tmp_path / "quiz.jsonl", [{"text": QUIZ}])
    other = write(tmp_path / "other.jsonl", [{"text": "nothing of this " * 9}])
    records = [{"text": f"Answer key: {QUIZ.upper()}!"}, {"text": "something else altogether"}]
    block, tally = read(
        tmp_path, records, decontamination={"against": [str(other), str(evaluation)]}
    )
    assert texts(block / DOCUMENTS_FILE) == ["something else altogether"]
    assert tally.dropped == {"contaminated:quiz.jsonl": 1}
    assert tally.to_dict(["quiz.jsonl", "other.jsonl"])["contaminated"] == {
        "other.jsonl": 0,
        "quiz.jsonl": 1,
    }


def test_an_evaluation_set_without_text_is_refused(tmp_path: Path) -> None:
    empty = write(tmp_path / "quiz.jsonl", [{"text": " "}])
    with pytest.raises(UserError, match=r"quiz\.jsonl: it holds no text"):
        read(tmp_path, [{"text": "a"}], decontamination={"against": [str(empty)]})


def test_an_evaluation_set_that_is_hardly_read_is_refused(tmp_path: Path) -> None:
    quiz = write(tmp_path / "quiz.jsonl", [{"text": QUIZ}, *[{"question": QUIZ}] * 9])
    with pytest.raises(UserError, match=r"quiz\.jsonl: .*:2: no field 'text'.*9 of 10 records"):
        read(tmp_path, [{"text": "a"}], decontamination={"against": [str(quiz)]})


def test_a_limit_stops_the_reading(tmp_path: Path) -> None:
    block, tally = read(tmp_path, [{"text": f"text {number}"} for number in range(9)], limit=4)
    assert tally.documents == tally.kept == 4
    assert texts(block / DOCUMENTS_FILE) == [f"text {number}" for number in range(4)]


def chosen(
    folder: Path, blocks: list[list[str]], dedup: dict[str, Any], fraction: float = 0.3
) -> Selected:
    """What is selected of blocks of texts; the splits' files lie in `folder`."""
    paths, tallies = [], []
    for number, block in enumerate(blocks):
        (folder / str(number)).mkdir()
        path, tally = read(folder / str(number), [{"text": text} for text in block], dedup=dedup)
        paths.append(path)
        tallies.append(tally)
    recipe = Data.model_validate({"dedup": dedup}).dedup
    edges = []
    for partition in range(2):
        found = match(partition, folder, partitions=2, blocks=paths, dedup=recipe)
        edges.append(folder / found)
    join(edges, folder)
    (part,) = plan_parts(paths, tallies)
    task = partial(select, part, folder, duplicates=folder, validation_fraction=fraction)
    selected = task()
    moved = misplaced([selected])
    return task(moved=moved) if moved else selected


STORY = [f"word{number}" for number in range(200)]


def test_exact_and_near_duplicates_are_told_apart(tmp_path: Path) -> None:
    original, other = " ".join(STORY), " ".join(reversed(STORY))
    near = " ".join([*STORY[:-1], "changed"])
    selected = chosen(tmp_path, [[other, original], [near, original], [other]], {"kind": "minhash"})
    assert selected.dropped == {"duplicate": 2, "near_duplicate": 1}
    assert selected.dropped_bytes["near_duplicate"] == len(near)
    kept = [text for path in (tmp_path / f"{s}.parquet" for s in SPLITS) for text in texts(path)]
    assert sorted(kept) == sorted([original, other])


def test_each_document_goes_to_one_split_in_order(tmp_path: Path) -> None:
    blocks = [[f"document {block}.{number}" for number in range(30)] for block in range(3)]
    selected = chosen(tmp_path, blocks, {"kind": "exact"})
    found = {split: texts(part_files([tmp_path], split)[0]) for split in SPLITS}
    together = [text for block in blocks for text in block]
    for split in SPLITS:
        assert found[split] == [text for text in together if text in set(found[split])]
        assert selected.documents[split] == len(found[split]) > 0
    assert sorted(found[TRAIN] + found[VALIDATION]) == sorted(together)


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_no_split_stays_empty(tmp_path: Path, fraction: float) -> None:
    selected = chosen(tmp_path, [["a", "b"], ["c"]], {"kind": "exact"}, fraction)
    assert sorted(selected.documents.values()) == [1, 2]
    for split in SPLITS:
        assert len(texts(part_files([tmp_path], split)[0])) == selected.documents[split]


def test_parts_are_whole_blocks_and_few(tmp_path: Path) -> None:
    blocks = [tmp_path / str(number) for number in range(100)]
    tallies = [Tally(kept=10, kept_bytes=5 << 20) for _ in blocks]
    parts = plan_parts(blocks, tallies)
    assert [block for part in parts for block in part.blocks] == blocks
    assert len(parts) == 17
    assert all(part.bytes == 30 << 20 for part in parts[:-1])
    assert [part.offset for part in parts[:3]] == [0, 60, 120]
    assert plan_parts(blocks[:2], [Tally(), Tally()]) == [Part(tuple(blocks[:2]), 0, 0)]
