"""The stage on a workspace of a few documents, a tiny model and no platform."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from pipelines.data.documents import DocumentWriter
from pipelines.data.normalize import Document
from pipelines.data.tokens.chat_encoder import make_chat_tokenizer
from pipelines.data.tokens.token_shards import ShardWriter
from pipelines.data.tokens.tokenizer import Encoder, byte_tokenizer, save_tokenizer
from pipelines.evaluation.perplexity import score_documents
from pipelines.models.presets import preset
from pipelines.models.pretrained import save_pretrained
from pipelines.models.transformer import Transformer
from pipelines.recipe.data_section import Instruction
from pipelines.recipe.recipe import Recipe
from pipelines.run.progress import ProgressReader
from pipelines.run.records import (
    TASK_SCORES,
    DatasetRef,
    EvaluateRecord,
    PreprocessRecord,
    Split,
    TrainRecord,
    output_folder,
)
from pipelines.run.verdict import Probes
from pipelines.stages.evaluate import evaluation, scoring

torch.set_num_threads(1)
HELD_OUT = [f"def f{number}(x):\n    return x * {number}\n" * 4 for number in range(12)]
TRAINING = [f"def g{number}(y):\n    return y + {number}\n" * 4 for number in range(30)]


def write_documents(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with DocumentWriter(path) as writer:
        for number, text in enumerate(texts):
            doc_id = hashlib.sha256(text.encode()).hexdigest()
            source = f"<{path.stem}>/{number}.py"
            writer.add(Document(doc_id=doc_id, source=source, text=text, bytes=len(text.encode())))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("workspace"))


def make_workspace(path: Path, vocabulary: int = 257) -> Path:
    preprocess, train = (output_folder(path, stage) for stage in ("preprocess", "train"))
    write_documents(preprocess / "documents" / "validation-00000.parquet", HELD_OUT)
    write_documents(preprocess / "documents" / "train-00000.parquet", TRAINING)
    save_tokenizer(byte_tokenizer(), preprocess / "tokenizer")
    writer = ShardWriter(preprocess / "validation-00000", vocabulary)
    for ids in Encoder(preprocess / "tokenizer").encode(HELD_OUT):
        writer.add(ids)
    train_split, held_out = (
        Split(documents=len(texts), bytes=sum(map(len, texts)), tokens=3000, shards=shards)
        for texts, shards in ((TRAINING, ()), (HELD_OUT, (writer.close(),)))
    )
    dataset = DatasetRef(vocab_size=vocabulary, train=train_split, validation=held_out)
    stats = {"documents": {"in": 45, "kept": 42, "dropped": {"duplicate": 3}}}
    PreprocessRecord(dataset=dataset, stats=stats).write(path)
    model = Transformer(preset("llama-100k").sized(vocabulary, 32))
    model.init_weights(0)
    save_pretrained(model, train / "model", end_of_text=256)
    save_tokenizer(byte_tokenizer(), train / "model")
    points = [{"step": step, "tokens": 33 * step, "loss": 5.0 / step} for step in (1, 2, 3)]
    (train / "history.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    TrainRecord(
        model="model", model_hash="0", parameters=100_000, steps=3, tokens=99, metrics={}
    ).write(path)
    return path


def recipe(**options: Any) -> Recipe:
    unprobed = {"bias": {"enabled": False}, "safety": {"documents": 0}}
    wanted = unprobed | {"prompts": ["def ", "<b>"], "sample_tokens": 4} | options
    return Recipe(name="tiny", evaluate=wanted)


def outputs(workspace: Path) -> dict[str, bytes]:
    folder = output_folder(workspace, "evaluate")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_measures_all_held_out_documents(workspace: Path) -> None:
    record = evaluation.run(recipe(), workspace)
    assert record == EvaluateRecord.read(workspace)
    assert (record.documents, record.bytes) == (12, sum(len(text) for text in HELD_OUT))
    assert 7.5 < record.bits_per_byte < 8.5  # the model was never trained
    assert list(record.baselines) == [
        "ngram-1", "ngram-2", "ngram-3", "ngram-5", "xz", "xz-per-document",
    ]  # fmt: skip
    assert all(0 < bits < 8 for name, bits in record.baselines.items() if name != "xz-per-document")
    ids = sorted(hashlib.sha256(text.encode()).hexdigest() for text in HELD_OUT)
    assert record.data_hash == hashlib.sha256("\n".join(ids).encode()).hexdigest()
    assert [sample[:4] for sample in record.samples] == ["def ", record.samples[1][:4]]
    assert record.samples[1].startswith("<b>")
    names = {
        "scores.parquet",
        "task_scores.parquet",
        "samples.json",
        "answers.json",
        "loss_curve.csv",
        "probes.json",
        "loss_curve.png",
        "slices.csv",
        "report.html",
        "record.json",
    }
    assert set(outputs(workspace)) == names


def test_slices_have_their_figures_and_intervals(workspace: Path) -> None:
    folder = output_folder(workspace, "preprocess") / "documents"
    texts = [f"def f{number}(x):\n    return x * {number}\n" * 4 for number in range(100, 125)]
    texts += [
        f"안녕하세요. 오늘은 {number}번째 날이고 날씨가 맑습니다.\n" * 40 for number in range(30)
    ]
    write_documents(folder / "validation-00001.parquet", texts)
    try:
        record = evaluation.run(recipe(sample_tokens=0), workspace)
    finally:
        (folder / "validation-00001.parquet").unlink()
    assert record.interval is not None
    assert record.interval.lower < record.interval.value < record.interval.upper
    assert record.interval.value == pytest.approx(record.bits_per_byte)
    found = {str(each.slice): each for each in record.slices}
    assert found["language ko"].documents == 30
    assert found["length 1 to 4 KiB"].documents == 30
    kept = pq.read_table(output_folder(workspace, "evaluate") / "scores.parquet").to_pandas()
    korean = kept[kept.language == "ko"]
    assert found["language ko"].bytes == korean.bytes.sum()
    score = found["language ko"].bits_per_byte
    assert score.value == pytest.approx(korean.nats.sum() / math.log(2) / korean.bytes.sum())
    assert score.lower < score.value < score.upper
    assert "(" in outputs(workspace)["report.html"].decode()


def test_behavioural_tests_are_in_the_record_and_on_the_page(workspace: Path) -> None:
    case = {"prompt": "def f", "continuation": "0", "wrong": "(x)"}
    swapped = {"prompt": "def f", "continuation": "(x)", "wrong": "0"}
    test = {"name": "names", "kind": "minimum_functionality", "cases": [case, swapped]}
    record = evaluation.run(recipe(sample_tokens=0, behaviour=[test]), workspace)
    (score,) = record.behaviours
    assert (score.name, score.cases, score.passed) == ("names", 2, 1)
    page = outputs(workspace)["report.html"].decode()
    assert ">minimum functionality</td>" in page
    assert "1 of 2</td>" in page
    evaluation.run(recipe(sample_tokens=0), workspace)
    assert "Behavioural tests" not in outputs(workspace)["report.html"].decode()


def test_held_out_questions_are_answered(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path, vocabulary=259)
    make_chat_tokenizer(workspace / "outputs/train/model", Instruction(kind="messages"))
    with DocumentWriter(
        workspace / "outputs/preprocess/documents/validation-00001.parquet"
    ) as writer:
        for number in range(7):
            said = f"What is {number} and 1?", f"A sum.\n#### {number + 1}"
            talk = tuple(zip(("user", "assistant"), said, strict=True))
            doc_id = hashlib.sha256(said[0].encode()).hexdigest()
            writer.add(
                Document("q.jsonl", "\n\n".join(said), doc_id, len("".join(said)), messages=talk)
            )
    asked = {"most": 5, "max_tokens": 4}
    record = evaluation.run(recipe(sample_tokens=0, questions=asked), workspace)
    assert (record.exact_match.questions, record.exact_match.right) == (5, 0)
    assert 0 == record.exact_match.share.lower < record.exact_match.share.upper < 0.5
    answers = json.loads(outputs(workspace)["answers.json"])
    assert len(answers) == 5
    tasks = pq.read_table(output_folder(workspace, "evaluate") / TASK_SCORES).to_pylist()
    assert [(each["task"], each["question"], each["value"]) for each in tasks] == [
        ("questions", answer["question"], 0.0) for answer in answers
    ]
    assert all(int(answer["wanted"]) in range(1, 8) for answer in answers)
    assert "0 of 5</td>" in outputs(workspace)["report.html"].decode()


def test_bias_memorisation_and_leakage_are_in_the_record(workspace: Path) -> None:
    safety = {"documents": 20, "prefix_tokens": 8, "continuation_tokens": 8, "generations": 2}
    record = evaluation.run(recipe(sample_tokens=0, bias={}, safety=safety), workspace)
    found = record.probes
    assert [each.name for each in found.bias] == ["gender en", "gender ko", "age en", "age ko"]
    assert all(
        each.preference.lower < each.preference.value < each.preference.upper for each in found.bias
    )
    memorised = found.memorisation
    assert (memorised.prefix_tokens, memorised.continuation_tokens) == (8, 8)
    assert (memorised.training.passages, memorised.held_out.passages) == (20, 12)
    assert (memorised.training.extracted, memorised.held_out.extracted) == (0, 0)
    assert (found.leakage.continuations, found.leakage.leaking) == (2, 0)
    assert set(found.figures()) == {
        "bias/gender en",
        "bias/gender ko",
        "bias/age en",
        "bias/age ko",
        "memorisation/training",
        "memorisation/held_out",
        "leakage",
    }
    assert EvaluateRecord.read(workspace) == record
    assert json.loads(outputs(workspace)["probes.json"]) == {"extracted": [], "leaks": []}


def test_a_users_own_templates_are_measured(workspace: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    templates = [
        {
            "text": f"{{term}}{{은/는}} {number}번 문장이다.",
            "ascribed_to": "가" if number % 2 else "나",
        }
        for number in range(6)
    ]
    groups = {"가": ["형"], "나": ["누나"]}
    own = {"name": "own", "language": "ko", "groups": groups, "templates": templates}
    file.write_text(json.dumps({"sets": [own]}))
    asked = {"templates": str(file)}
    (score,) = evaluation.run(recipe(sample_tokens=0, bias=asked), workspace).probes.bias
    assert (score.name, score.templates, score.pairs) == ("own", 6, 1)


def test_what_is_not_asked_for_is_not_measured(workspace: Path) -> None:
    record = evaluation.run(recipe(sample_tokens=0), workspace)
    assert record.probes == Probes()


def test_the_stride_is_the_recipes(workspace: Path) -> None:
    whole = evaluation.run(recipe(sample_tokens=0), workspace)
    other = evaluation.run(recipe(sample_tokens=0, stride=0.25), workspace)
    assert (whole.stride, other.stride) == (0.75, 0.25)
    assert whole.bits_per_byte != other.bits_per_byte
    assert whole.data_hash == other.data_hash


def test_again_gives_the_same_bytes_however_the_work_is_spread(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "PART_BYTES", 300)

    def backwards(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        """As a cluster may: every call made before the first result is asked for."""
        return iter([function(item) for item in reversed(items)][::-1])

    evaluation.run(recipe(), workspace)
    first = outputs(workspace)
    evaluation.run(recipe(), workspace, backwards)
    assert outputs(workspace) == first


def test_scores_do_not_depend_on_the_parts(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluation.run(recipe(), workspace)
    monkeypatch.setattr(scoring, "PART_BYTES", 1)  # every document by itself
    parted = evaluation.run(recipe(), workspace)
    assert parted.bits_per_byte == pytest.approx(whole.bits_per_byte, rel=1e-6)
    assert parted.data_hash == whole.data_hash


def test_max_bytes_takes_whole_documents_by_hash(workspace: Path) -> None:
    limit = 3 * len(HELD_OUT[0])
    few = evaluation.run(recipe(max_bytes=limit), workspace)
    assert 0 < few.bytes <= limit
    assert evaluation.run(recipe(max_bytes=1), workspace).documents == 1


def test_says_how_far_it_is(workspace: Path) -> None:
    (workspace / "progress.jsonl").unlink(missing_ok=True)
    record = evaluation.run(recipe(), workspace)
    last = list(ProgressReader(workspace).read())[-1]
    assert last.stage == "evaluate"
    assert last.done == last.total == record.bytes / 1024


def test_the_page_is_whole_and_escaped(workspace: Path) -> None:
    evaluation.run(recipe(), workspace)
    page = outputs(workspace)["report.html"].decode()
    assert "<b>&lt;b&gt;</b>" in page  # the second prompt
    assert "&lt;validation-00000&gt;/" in page
    assert "3 of 45 documents were dropped: 3 duplicate." in page
    assert str(workspace) not in page


def test_the_page_says_what_the_n_grams_were_fitted_on(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "BASELINE_TRAINING_BYTES", 1)  # one document, all the same
    evaluation.run(recipe(sample_tokens=0), workspace)
    page = outputs(workspace)["report.html"].decode()
    first = min(TRAINING, key=lambda text: hashlib.sha256(text.encode()).hexdigest())
    assert f"fitted on a sample of {len(first)} bytes from" in page


def test_scores_are_what_score_documents_says(workspace: Path) -> None:
    evaluation.run(recipe(), workspace)
    kept = pq.read_table(output_folder(workspace, "evaluate") / "scores.parquet")
    texts = output_folder(workspace, "preprocess") / "documents" / "validation-00000.parquet"
    documents = pq.read_table(texts).sort_by("doc_id")
    again = score_documents(output_folder(workspace, "train") / "model", documents)
    assert kept["doc_id"].to_pylist() == again["doc_id"].to_pylist()
    assert kept["nats"].to_pylist() == pytest.approx(again["nats"].to_pylist(), rel=1e-5)
