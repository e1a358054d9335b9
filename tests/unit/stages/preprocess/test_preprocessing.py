import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from pipelines.core.errors import UserError
from pipelines.core.storage import folder_hash, md5, write_json
from pipelines.data import passes
from pipelines.data.cleaning.decontaminate import EvaluationNgrams, set_files
from pipelines.data.reading.source_fingerprint import fingerprint_inputs
from pipelines.data.tokens.tokenizer import Encoder
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import dump_yaml
from pipelines.run.progress import ProgressReader
from pipelines.run.records import PreprocessRecord, output_folder
from pipelines.run.workspace import read_recipe
from pipelines.stage_cache.fingerprint import CODE_FILE
from pipelines.stages.preprocess import preprocessing
from pipelines.stages.preprocess.preprocessing import run
from tests.forked import exit_codes, start
from tests.indexed_dataset import IndexedDataset

T = TypeVar("T")
R = TypeVar("R")


def recipe(path: Path | None, tokenizer: str = "byte", **data: Any) -> Recipe:
    """A recipe for `path` (None: the library); `data` adds to or replaces parts of its section."""
    source = {"kind": "files", "path": str(path)} if path else {"kind": "stdlib"}
    source |= data.pop("source", {})
    losses = {"preference": "simpo", "labelled": "kto"}
    loss = losses.get(data.get("instruction", {}).get("kind"), "none")
    return Recipe.model_validate(
        {
            "name": "test",
            "preference": {"kind": loss},
            "data": {
                "source": source,
                "tokenizer": {
                    "kind": tokenizer,
                    "vocab_size": 300,
                    "path": data.pop("tokenizer_path", None),
                },
                "sequence_length": 16,
                "validation_fraction": 0.2,
                **data,
            },
        }
    )


def write_jsonl(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    lines = (json.dumps({field: text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    texts = [f"Document {number}: déjà vu 日本語 😀\r\n\n  indented" for number in range(60)]
    return write_jsonl(tmp_path / "corpus.jsonl", [*texts, texts[0], "  "])


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    path = tmp_path / "work space"
    path.mkdir()
    return path


def texts(workspace: Path, split: str) -> list[str]:
    path = workspace / f"outputs/preprocess/documents/{split}-00000.parquet"
    return list(pq.read_table(path).column("text").to_pylist())


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_shards_hold_the_documents_exactly(corpus: Path, workspace: Path, tokenizer: str) -> None:
    record = run(recipe(corpus, tokenizer), workspace)
    output = workspace / "outputs/preprocess"
    encoder = Encoder(output / "tokenizer")
    for split, reference in (
        ("train", record.dataset.train),
        ("validation", record.dataset.validation),
    ):
        (shard,) = reference.shards
        assert md5(output / shard.path) == shard.md5
        assert md5((output / shard.path).with_suffix(".idx")) == shard.index_md5
        dataset = IndexedDataset((output / shard.path).with_suffix(""))
        documents = [dataset.document(index) for index in range(len(dataset))]
        assert all(ids[-1] == encoder.end_id for ids in documents)
        assert [encoder.decode(ids[:-1]) for ids in documents] == texts(workspace, split)
        assert len(dataset.tokens) == shard.tokens == reference.tokens
    assert encoder.vocab_size == record.dataset.vocab_size
    assert not set(texts(workspace, "train")) & set(texts(workspace, "validation"))
    assert PreprocessRecord.read(workspace) == record


def test_the_statistics_add_up(corpus: Path, workspace: Path) -> None:
    record = run(recipe(corpus), workspace)
    stats = json.loads((workspace / "outputs/preprocess/stats.json").read_text())
    assert stats == record.stats
    assert stats["documents"] == {"in": 62, "kept": 60, "dropped": {"duplicate": 1, "empty": 1}}
    splits = stats["splits"].values()
    for key, total in (
        ("documents", stats["documents"]["kept"]),
        ("bytes", stats["bytes"]["kept"]),
        ("tokens", stats["tokens"]),
    ):
        assert sum(split[key] for split in splits) == total
    # A byte tokenizer's tokens are the bytes and one end a document.
    assert stats["tokens"] == stats["bytes"]["kept"] + 60


def test_outputs_depend_on_neither_place_nor_plan(
    corpus: Path, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(recipe(corpus, "bpe"), workspace)
    moved = tmp_path / "elsewhere" / corpus.name
    moved.parent.mkdir()
    corpus.rename(moved)
    monkeypatch.setattr(passes, "LEAST_BLOCK_BYTES", 500)

    def eager(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        return iter([function(item) for item in items])

    (tmp_path / "second").mkdir()
    run(recipe(moved, "bpe"), tmp_path / "second", eager)
    assert folder_hash(workspace / "outputs") == folder_hash(tmp_path / "second/outputs")


def test_running_again_replaces_what_was_there(corpus: Path, workspace: Path) -> None:
    first = run(recipe(corpus, shard_tokens=1024), workspace)
    assert len(first.dataset.train.shards) > 1
    run(recipe(corpus), workspace)
    shards = sorted(path.name for path in (workspace / "outputs/preprocess/tokens").iterdir())
    assert shards == [
        "train-00000.bin",
        "train-00000.idx",
        "validation-00000.bin",
        "validation-00000.idx",
    ]


def test_a_failed_run_leaves_no_record(corpus: Path, workspace: Path) -> None:
    run(recipe(corpus), workspace)
    with pytest.raises(UserError):
        run(recipe(workspace / "missing.txt"), workspace)
    assert not (workspace / "outputs/preprocess/record.json").exists()


def test_the_first_documents_only(corpus: Path, workspace: Path) -> None:
    record = run(recipe(corpus, source={"max_documents": 10}), workspace)
    assert record.stats["documents"]["in"] == 10
    kept = texts(workspace, "train") + texts(workspace, "validation")
    assert {text.split(":")[0] for text in kept} == {f"Document {number}" for number in range(10)}


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_no_split_is_empty(corpus: Path, workspace: Path, fraction: float) -> None:
    record = run(recipe(corpus, validation_fraction=fraction), workspace)
    sizes = (record.dataset.train.documents, record.dataset.validation.documents)
    assert sorted(sizes) == [1, 59]


def test_a_single_text_file_can_be_trained_on(tmp_path: Path, workspace: Path) -> None:
    verse = "Es war einmal ein König,\nder hatte einen großen Floh,\nden liebt' er gar nicht wenig"
    path = tmp_path / "faust.txt"
    path.write_text("\n\n".join(f"{number}. {verse}" for number in range(40)), encoding="utf-8")
    record = run(recipe(path, "char"), workspace)
    assert record.dataset.validation.documents >= 1
    assert record.stats["bytes"]["kept"] == path.stat().st_size


def test_parquet_and_text_field(tmp_path: Path, workspace: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"body": [f"row number {number} of it" for number in range(9)]}), path)
    record = run(recipe(path, source={"text_field": "body"}), workspace)
    assert record.stats["documents"]["kept"] == 9


def test_the_library(workspace: Path) -> None:
    record = run(recipe(None, source={"max_documents": 20}), workspace)
    documents = record.stats["documents"]
    assert documents["kept"] + documents["dropped"].get("duplicate", 0) == 20


def test_a_pretrained_tokenizer(corpus: Path, workspace: Path, tmp_path: Path) -> None:
    first = run(recipe(corpus, "bpe"), workspace)
    theirs = tmp_path / "theirs"
    (workspace / "outputs/preprocess/tokenizer").rename(theirs)
    second = run(recipe(corpus, "pretrained", tokenizer_path=str(theirs)), workspace)
    assert second.dataset.train == first.dataset.train


def word_level() -> Tokenizer:
    """Its decoder puts spaces between words, whatever stood there."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@pytest.mark.parametrize(
    ("make", "text", "loss"),
    [
        (word_level, "a\n\nb", r"'a\n\nb' comes back as 'a b'"),
        (word_piece, "a B", "'a B' comes back as 'a b'"),
    ],
)
def test_a_tokenizer_that_loses_text_is_refused_in_one_line(
    tmp_path: Path, workspace: Path, make: Callable[[], Tokenizer], text: str, loss: str
) -> None:
    path = tmp_path / "tokenizer.json"
    make().save(str(path))
    source = write_jsonl(tmp_path / "few.jsonl", ["a", "b", "a b", "a a", "a b b", text])
    with pytest.raises(UserError) as raised:
        run(recipe(source, "pretrained", tokenizer_path=str(path)), workspace)
    assert str(raised.value).startswith(f"{path}: this tokenizer does not give text back: {loss}; ")
    assert "\n" not in str(raised.value)


def test_unknown_words_are_no_reason_to_refuse_a_tokenizer(tmp_path: Path, workspace: Path) -> None:
    path = tmp_path / "tokenizer.json"
    word_level().save(str(path))
    source = write_jsonl(tmp_path / "few.jsonl", ["a", "b é", "a ☃☃ b", "☃", "☃ a"])
    record = run(recipe(source, "pretrained", tokenizer_path=str(path)), workspace)
    assert record.stats["documents"]["kept"] == 5


def test_held_out_text_shapes_no_char_tokenizer(tmp_path: Path, workspace: Path) -> None:
    alphabet = [chr(0x4E00 + number) for number in range(60)]  # each document has its own character
    run(recipe(write_jsonl(tmp_path / "hanzi.jsonl", alphabet), "char"), workspace)
    encoder = Encoder(workspace / "outputs/preprocess/tokenizer")
    (held_out, *_), train = texts(workspace, "validation"), texts(workspace, "train")
    assert encoder.vocab_size == 2 + len(train)
    assert encoder.decode(encoder.encode([held_out])[0]) == "<|unk|><|endoftext|>"


def test_one_malformed_line_is_counted_and_named(corpus: Path, workspace: Path) -> None:
    with corpus.open("a") as file:
        file.write("{broken\n")
    record = run(recipe(corpus, source={"max_malformed_fraction": 0.02}), workspace)
    assert record.stats["documents"]["dropped"]["malformed"] == 1
    assert record.stats["malformed"][0].startswith("corpus.jsonl:63: not JSON")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "it is empty; give a file with text"),
        ("blank.txt", b" \n\n", "it is empty"),
        ("empty.jsonl", b"", "it holds no record"),
        ("noise.bin", bytes(range(256)) * 9, "it is binary, not text"),
        ("noise.txt", bytes(range(128, 256)) * 9, "it is not UTF-8"),
        ("noise.jsonl", bytes(range(11, 256)) * 9, "noise.jsonl:1: not UTF-8; 1 of 1 records"),
        ("bad.jsonl", b'{"text": "good"}\n{bad\n', "bad.jsonl:2: not JSON"),
        ("field.jsonl", b'{"body": "a"}\n', "field.jsonl:1: no field 'text' among 'body'"),
        ("one.jsonl", b'{"text": "a"}\n{"text": "a"}\n', "only 1 document is left of 2, 1 dupl"),
    ],
)
def test_bad_input_is_one_line_with_the_file(
    tmp_path: Path, workspace: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        run(recipe(tmp_path / name), workspace)
    assert str(tmp_path / name) in str(raised.value)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_every_pass_tells_its_progress_to_the_end(corpus: Path, workspace: Path) -> None:
    run(recipe(corpus, "bpe"), workspace)
    last = {line.unit: line for line in ProgressReader(workspace).read()}
    assert list(last) == [
        "MiB read",
        "partitions matched",
        "partitions joined",
        "MiB selected",
        "MiB sampled",
        "MiB tokenized",
        "shards written",
    ]
    for line in last.values():
        assert line.stage == "preprocess"
        assert line.done == pytest.approx(line.total)


def die_within(workspace: Path, name: str, blocks: int) -> None:
    passes.LEAST_BLOCK_BYTES = 500
    task, done = getattr(preprocessing, name), []

    def killed(*args: Any, **kwargs: Any) -> Any:
        if len(done) == blocks:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(None)
        return task(*args, **kwargs)

    setattr(preprocessing, name, killed)
    run(read_recipe(workspace), workspace)


def run_killed(asked: Recipe, workspace: Path, task: str, blocks: int) -> None:
    """Run in a process that is killed within a pass, when so many of its blocks are done."""
    (workspace / "params.yaml").write_text(dump_yaml(asked))
    dead = start(die_within, workspace, task, blocks)
    assert exit_codes([dead]) == [-signal.SIGKILL]


def write_key(workspace: Path, asked: Recipe, code: str = "1") -> None:
    """What decides the passes' results beside the recipe."""
    write_json(workspace / "source.json", fingerprint_inputs(asked.data))
    write_json(workspace / CODE_FILE, {"preprocess": {"functions": code, "packages": "1"}})


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "blocks"), [("extract", 3), ("select", 0), ("tokenize", 1), ("assemble", 1)]
)
def test_a_killed_run_leaves_nothing_whole_and_the_next_goes_on(
    corpus: Path,
    workspace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    blocks: int,
) -> None:
    monkeypatch.setattr(passes, "LEAST_BLOCK_BYTES", 500)
    asked, undisturbed = recipe(corpus, "bpe", shard_tokens=1024), tmp_path / "undisturbed"
    undisturbed.mkdir()
    for path in (workspace, undisturbed):
        write_key(path, asked)
    run(asked, undisturbed)
    run(recipe(corpus), workspace)  # what is there already must not pass for this run's

    run_killed(asked, workspace, task, blocks)
    assert not (workspace / "outputs/preprocess").exists()
    finished = {path: path.stat().st_mtime_ns for path in workspace.glob("work/*/*/result.json")}
    assert len([path for path in finished if path.parts[-3] == task]) == blocks

    seen: dict[Path, int] = {}

    def looking(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        seen.update({path: path.stat().st_mtime_ns for path in finished})
        return map(function, items)

    run(asked, workspace, looking)
    assert seen == finished  # none of them was made again
    assert folder_hash(workspace / "outputs") == folder_hash(undisturbed / "outputs")
    assert not (workspace / "work").exists()


def test_what_was_made_for_another_recipe_is_not_taken(corpus: Path, workspace: Path) -> None:
    asked = recipe(corpus)
    write_key(workspace, asked)
    run_killed(asked, workspace, "select", 0)
    assert list(workspace.glob("work/extract/*/result.json"))
    length = {"enabled": True, "min_characters": 38}  # of "Document 10…"
    record = run(recipe(corpus, filters={"length": length}), workspace)
    assert record.stats["documents"]["dropped"]["length:too_short"] == 11


def test_what_other_code_made_is_not_taken(corpus: Path, workspace: Path) -> None:
    asked = recipe(corpus)
    times = []
    for code in ("1", "1", "2"):
        write_key(workspace, asked, code)
        run_killed(asked, workspace, "select", 0)
        made = workspace.glob("work/extract/*/result.json")
        times.append(max(path.stat().st_mtime_ns for path in made))
    assert times[0] == times[1] < times[2]


def test_the_first_documents_of_several_blocks(
    corpus: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "LEAST_BLOCK_BYTES", 500)
    record = run(recipe(corpus, source={"max_documents": 33}), workspace)
    assert record.stats["documents"] == {"in": 33, "kept": 33, "dropped": {}}
    kept = texts(workspace, "train") + texts(workspace, "validation")
    assert {text.split(":")[0] for text in kept} == {f"Document {number}" for number in range(33)}


def test_conversations_are_packed_with_the_loss_on_the_answers(
    tmp_path: Path, workspace: Path
) -> None:
    path = tmp_path / "chats.jsonl"
    chats = [
        [
            {"role": "user", "content": f"What is {number} + 1?"},
            {"role": "assistant", "content": f"It is {number + 1}."},
        ]
        for number in range(50)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    record = run(
        recipe(
            path,
            "bpe",
            instruction={"kind": "messages"},
            packing="best_fit",
            sequence_length=255,
        ),
        workspace,
    )
    output = workspace / "outputs/preprocess"
    encoder = Encoder(output / "tokenizer")
    assert record.dataset.packed_length == 255
    predicted = ""
    for split in (record.dataset.train, record.dataset.validation):
        (shard,) = split.shards
        dataset = IndexedDataset((output / shard.path).with_suffix(""))
        assert shard.mask_md5 == md5((output / shard.path).with_suffix(".mask"))
        assert set(np.diff(dataset.document_offsets)) == {256}
        predicted += encoder.decode(dataset.tokens[dataset.mask == 1])
    assert all(f"It is {number + 1}." in predicted for number in range(50))
    assert "What" not in predicted
    assert 0.5 < record.stats["packing"]["fill"] <= 1


def test_pairs_are_packed_whole_and_those_too_long_are_told_of(
    tmp_path: Path, workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pairs.jsonl"
    records = [
        {"prompt": f"What is {n} + 1?", "chosen": f"It is {n + 1}.", "rejected": f"Never {n}."}
        for n in range(50)
    ]
    records.append({"prompt": "Talk!", "chosen": "a" * 400, "rejected": "No."})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    asked = {
        "instruction": {"kind": "preference"},
        "packing": "best_fit",
        "document_mask": True,
    }
    record = run(recipe(path, sequence_length=255, **asked), workspace)
    assert record.dataset.pairs
    assert record.stats["left_out_pairs"] == 1
    assert "1 of 51 pairs are left out" in caplog.text
    output = workspace / "outputs/preprocess"
    encoder = Encoder(output / "tokenizer")
    predicted = ""
    for split in (record.dataset.train, record.dataset.validation):
        (shard,) = split.shards
        dataset = IndexedDataset((output / shard.path).with_suffix(""))
        assert set(np.diff(dataset.document_offsets)) == {256}
        predicted += encoder.decode(dataset.tokens[dataset.mask == 1])
    for n in range(50):
        assert f"It is {n + 1}.<|im_end|>\n<|endoftext|>Never {n}." in predicted
    assert "What" not in predicted
    with pytest.raises(UserError, match=r"no pair is left .* raise data\.sequence_length to keep"):
        run(recipe(path, sequence_length=63, **asked), workspace)


def test_a_labelled_answer_is_packed_beside_two_tokens_without_target(
    tmp_path: Path, workspace: Path
) -> None:
    path = tmp_path / "labelled.jsonl"
    records = [
        {"prompt": f"What is {n} + 1?", "response": f"It is {n + 1 + n % 2}.", "label": n % 2 == 0}
        for n in range(50)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    asked = {
        "instruction": {"kind": "labelled"},
        "packing": "best_fit",
        "document_mask": True,
        "validation_fraction": 0.2,
    }
    record = run(recipe(path, sequence_length=255, **asked), workspace)
    assert (record.dataset.pairs, record.dataset.labelled) == (True, True)
    assert record.stats["left_out_pairs"] == 0
    output = workspace / "outputs/preprocess"
    encoder = Encoder(output / "tokenizer")
    found = set()
    for split in (record.dataset.train, record.dataset.validation):
        (shard,) = split.shards
        dataset = IndexedDataset((output / shard.path).with_suffix(""))
        places = dataset.sequence_offsets
        for begin, end in pairwise(places):
            sample = dataset.document_offsets[dataset.document_offsets <= begin][-1]
            said = encoder.decode(dataset.tokens[begin:end][dataset.mask[begin:end] == 1])
            if said:
                before = ((sample <= places) & (places < begin)).sum()
                found.add((said, before % 2))
    answers = {(f"It is {n + 1 + n % 2}.<|im_end|>\n<|endoftext|>", n % 2) for n in range(50)}
    assert found == answers


def test_cleaning_is_reported(corpus: Path, workspace: Path, tmp_path: Path) -> None:
    with corpus.open("a", encoding="utf-8") as file:
        for text in ("call jane.roe@corp.net, " * 3, "quiz " * 20, "x"):
            file.write(json.dumps({"text": text}) + "\n")
    write_jsonl(tmp_path / "quiz.jsonl", ["quiz " * 20])
    record = run(
        recipe(
            corpus,
            filters={"length": {"enabled": True, "min_characters": 5}},
            pii={"action": "mask"},
            decontamination={"against": [str(tmp_path / "quiz.jsonl")]},
            dedup={"kind": "minhash"},
        ),
        workspace,
    )
    dropped = record.stats["documents"]["dropped"]
    assert dropped["contaminated:quiz.jsonl"] == dropped["length:too_short"] == 1
    assert record.stats["contaminated"] == {"quiz.jsonl": 1}
    (kept,) = set_files(output_folder(workspace, "preprocess")).items()  # for the data gate
    assert kept[0] == "quiz.jsonl"
    assert len(EvaluationNgrams.load(kept[1])) > 0
    assert record.stats["pii"] == {"email": 3}
    kept = texts(workspace, "train") + texts(workspace, "validation")
    assert "call <EMAIL>, call <EMAIL>, call <EMAIL>, " in kept
    lines = (workspace / "outputs/preprocess/rejects.jsonl").read_text().splitlines()
    rejects = {reject["reason"]: reject for reject in map(json.loads, lines)}
    assert rejects["length:too_short"]["excerpt"] == "x"
    assert rejects["contaminated:quiz.jsonl"]["source"] == "corpus.jsonl:64"


def test_a_source_that_changed_since_the_run_began_is_refused(
    corpus: Path, workspace: Path
) -> None:
    write_json(workspace / "source.json", fingerprint_inputs(recipe(corpus).data))
    run(recipe(corpus), workspace)
    corpus.write_bytes(corpus.read_bytes().replace(b"Document 7", b"Document 8"))
    with pytest.raises(UserError, match=r"corpus\.jsonl changed since this run began"):
        run(recipe(corpus), workspace)
    assert not (workspace / "outputs/preprocess/record.json").exists()
