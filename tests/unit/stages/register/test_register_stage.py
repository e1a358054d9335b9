"""Real models of a few thousand parameters, a real registry, and every verdict."""

import hashlib
import json
import math
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.core.product import PRODUCT_FILES
from pipelines.core.storage import folder_hash, mark_complete, read_json, write_json, write_text
from pipelines.data.documents import DocumentWriter
from pipelines.data.tokens.tokenizer import (
    byte_tokenizer,
    character_tokenizer,
    save_tokenizer,
    train_bpe,
)
from pipelines.evaluation import harness
from pipelines.evaluation.behaviour import run_tests
from pipelines.evaluation.gate import bits_per_byte
from pipelines.evaluation.held_out_documents import read_documents
from pipelines.evaluation.loss_curve import CurvePoint, write_curve
from pipelines.evaluation.perplexity import score_documents
from pipelines.evaluation.task_scores import TaskRow, task_table
from pipelines.models.config import DecoderConfig
from pipelines.models.pretrained import save_pretrained
from pipelines.models.transformer import Transformer
from pipelines.recipe.evaluation_section import Behaviour
from pipelines.recipe.recipe import Harness, Recipe, TaskLimit
from pipelines.recipe.recipe_files import dump_yaml
from pipelines.registry import registry
from pipelines.registry.audit import Trail
from pipelines.registry.comparisons import part_of, take_turn
from pipelines.registry.promotion import promote, rollback
from pipelines.run.records import (
    DatasetRef,
    EvaluateRecord,
    PreprocessRecord,
    RegisterRecord,
    Split,
    TrainRecord,
)
from pipelines.run.usage import metered
from pipelines.run.verdict import BiasScore, Estimate, Probes, ServedCheck
from pipelines.stages.register import comparing, register_stage
from pipelines.stages.register.answer import Answer, forget_answer
from tests.forked import exit_codes, start
from tests.unit.evaluation.test_judge import answering, longer

TEXTS = [f"def add_{name}(a, b):\n    return a + b + '{name}'\n" for name in "abcdefghijklmnopqrst"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of three models, the best first."""
    documents = documents_in(tmp_path_factory.mktemp("documents"))
    found = []
    for seed in range(3):
        folder = tmp_path_factory.mktemp("model") / "model"
        save_tokenizer(byte_tokenizer(), folder)
        config = DecoderConfig(
            layers=1, width=16, heads=2, kv_heads=1, hidden=32, vocab_size=257, context_length=64
        )
        model = Transformer(config)
        model.init_weights(seed)
        with torch.no_grad():
            model.lm_head.weight.mul_(10.0 * seed)  # the surer of random guesses the worse
        save_pretrained(model, folder, end_of_text=256)
        found.append((bits_per_byte(score_documents(folder, documents)), folder))
    return [folder for _, folder in sorted(found)]


@pytest.fixture(autouse=True)
def few_packages(tmp_path_factory, monkeypatch):
    """The bill of materials of a whole lock is half of what a registration takes."""
    project = tmp_path_factory.mktemp("project")
    (project / "requirements.lock").write_text("torch==2.0.0\n")
    monkeypatch.setattr(register_stage, "PRODUCT_FILES", project)


@pytest.fixture
def recipe(request):
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:8]
    return Recipe.model_validate({"name": "small", "register": {"model_name": name}})


@pytest.fixture
def trained(tmp_path, home, mlflow_client, mlflow_run):
    """Makes the workspace of a run that has trained and evaluated a model."""

    def make(model, dirty=False):
        experiment = mlflow_client.get_run(mlflow_run).info.experiment_id
        run_id = mlflow_client.create_run(experiment).info.run_id
        workspace = tmp_path / run_id
        facts = {"mlflow_run_id": run_id, "dirty": dirty, "git_commit": "c0ffee"}
        write_json(workspace / "run.json", facts)
        documents = documents_in(workspace / "outputs/preprocess/documents")
        split = Split(documents=3, bytes=50, tokens=53, shards=())
        dataset = DatasetRef(vocab_size=257, train=split, validation=split)
        PreprocessRecord(dataset=dataset, stats={}).write(workspace)
        folder = workspace / "outputs/train/model"
        shutil.copytree(model, folder)
        TrainRecord(
            model="model",
            model_hash=folder_hash(folder),
            parameters=9000,
            steps=1,
            tokens=64,
            metrics={"loss": 5.0},
        ).write(workspace)
        write_scores(workspace, score_documents(folder, documents))
        points = [CurvePoint(step, 60 * step, 5.0 / step, 7.0 / step) for step in (1, 2, 3)]
        write_curve(points, workspace / "outputs/evaluate/loss_curve.csv")
        return workspace

    return make


def documents_in(folder):
    folder.mkdir(parents=True, exist_ok=True)
    with DocumentWriter(folder / "validation-00000.parquet") as writer:
        for text in TEXTS:
            digest = hashlib.sha256(text.encode()).hexdigest()
            row = {"doc_id": digest, "source": "a.py", "text": text}
            writer.add_row(row | {"bytes": len(text.encode())})
    return read_documents(folder, "validation", 1000)


def write_scores(workspace, scores):
    folder = workspace / "outputs/evaluate"
    folder.mkdir(parents=True)
    pq.write_table(scores, folder / "scores.parquet")
    EvaluateRecord(
        bits_per_byte=bits_per_byte(scores),
        perplexity=200.0,
        documents=3,
        bytes=50,
        data_hash="d" * 8,
        baselines={"xz": 1.5},
        samples=(),
    ).write(workspace)


def test_the_first_model_becomes_champion_and_is_whole(
    models, trained, recipe, mlflow_client, home
):
    workspace = trained(models[1])
    record = register_stage.run(recipe, workspace)
    assert record == RegisterRecord.read(workspace)
    assert record.verdict.decision == "promoted"
    assert (record.model.version, record.model.aliases) == (1, ("champion",))
    verdict = read_json(workspace / "outputs/register/verdict.json")
    assert verdict["decision"] == "promoted"
    tags = mlflow_client.get_run(workspace.name).data.tags
    assert tags["penstock.verdict"] == "promoted"
    assert tags["penstock.champion"] == f"{record.model.name}/1"
    folder = registry.download(record.model.name)
    lineage = json.loads((folder / "lineage.json").read_text())
    assert lineage["run"]["git_commit"] == "c0ffee"
    assert set(lineage["records"]) == {"preprocess", "train", "evaluate"}
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "| xz -9e, all together | 1.5000 |" in card


def test_a_first_model_that_breaks_a_bound_is_not_registered(models, trained, recipe, home):
    workspace = trained(models[1])
    found = Estimate(value=2.0, lower=1.5, upper=2.5)
    bias = BiasScore(name="gender en", language="en", templates=12, pairs=4, preference=found)
    record = EvaluateRecord.read(workspace)
    record.model_copy(update={"probes": Probes(bias=(bias,))}).write(workspace)
    bounded = recipe.registration.model_copy(update={"max_bias": 1.0})
    refused = register_stage.run(recipe.model_copy(update={"registration": bounded}), workspace)
    assert (refused.verdict.decision, refused.model) == ("refused", None)
    assert refused.verdict.reason.startswith("bias gender en beyond 1 bits a sentence: 2.0000 ")
    verdict = read_json(workspace / "outputs/register/verdict.json")
    assert verdict["probes"]["bias"][0]["preference"] == found.model_dump()
    promoted = register_stage.run(recipe, workspace)
    assert promoted.verdict.decision == "promoted"
    assert register_stage.run(recipe, workspace).verdict.probes == promoted.verdict.probes


def page_of(workspace, mlflow_client):
    """The compare page of a run, as it lies among the run's artifacts and in the stage's output."""
    written = (workspace / "outputs/register/compare.html").read_text()
    artifacts = mlflow_client.get_run(workspace.name).info.artifact_uri
    assert (Path(artifacts) / "register/compare.html").read_text() == written
    return written


def publish_curve(workspace, mlflow_client):
    """As the evaluate stage does."""
    curve = workspace / "outputs/evaluate/loss_curve.csv"
    mlflow_client.log_artifact(workspace.name, str(curve), "evaluate")


def test_each_verdict_has_its_page_beside_the_champion(models, trained, recipe, mlflow_client):
    name = recipe.registration.model_name
    first = trained(models[1])
    register_stage.run(recipe, first)
    page = page_of(first, mlflow_client)
    assert "there is no champion" in page and "the first model" in page
    publish_curve(first, mlflow_client)
    better, worse = trained(models[0]), trained(models[2])
    found = register_stage.run(recipe, better).verdict
    page = page_of(better, mlflow_client)
    assert found.reason in page and f"<code>{name}@1</code>" in page
    assert page.count('class="line" d="M') == 2
    register_stage.run(recipe, worse)
    page = page_of(worse, mlflow_client)
    assert f"<code>{name}@2</code>" in page and "Refused" in page
    assert f"No loss of {name}@2 is kept." in page


def test_a_retry_behind_the_alias_writes_the_same_page(models, trained, recipe, mlflow_client):
    register_stage.run(recipe, trained(models[2]))
    workspace = trained(models[0])
    register_stage.run(recipe, workspace)
    first = page_of(workspace, mlflow_client)
    register_stage.run(recipe, workspace)
    assert page_of(workspace, mlflow_client) == first
    assert f"{recipe.registration.model_name}@1" in first


def test_where_the_page_fails_nothing_is_registered(models, trained, recipe):
    workspace = trained(models[0])
    (workspace / "outputs/evaluate/loss_curve.csv").write_text("step\nx\n")
    with pytest.raises(ValueError, match="invalid literal"):
        register_stage.run(recipe, workspace)
    assert registry.champion(recipe.registration.model_name) is None
    assert recipe.registration.model_name not in {each.name for each in registry.list_models()}


def test_a_champion_whose_files_are_gone_is_still_named_on_the_page(
    models, trained, recipe, home, mlflow_client
):
    register_stage.run(recipe, trained(models[2]))
    shutil.rmtree(home / "scores")
    shutil.rmtree(registry.download(recipe.registration.model_name))
    workspace = trained(models[0])
    register_stage.run(recipe, workspace)
    page = page_of(workspace, mlflow_client)
    assert "can&#39;t be evaluated" in page
    assert "The champion&#39;s recipe is not known." in page


@pytest.mark.parametrize("lineage", ["{", '{"records": {"evaluate": {"probes": {"bias": "?"}}}}'])
def test_a_champion_of_broken_files_does_not_stop_its_successor(
    models, trained, recipe, mlflow_client, lineage
):
    first = trained(models[2])
    register_stage.run(recipe, first)
    (registry.download(recipe.registration.model_name) / "lineage.json").write_text(lineage)
    (first / "outputs/evaluate/loss_curve.csv").write_text("step\n1\n")
    publish_curve(first, mlflow_client)
    workspace = trained(models[0])
    assert register_stage.run(recipe, workspace).verdict.decision == "promoted"
    page = page_of(workspace, mlflow_client)
    assert "The champion&#39;s recipe is not known." in page
    assert f"No loss of {recipe.registration.model_name}@1 is kept." in page


def test_training_out_of_the_cache_costs_what_it_cost_before(
    models, trained, recipe, mlflow_client
):
    earlier, workspace = trained(models[1]), trained(models[1])
    digest = TrainRecord.read(earlier).model_hash
    mlflow_client.set_tag(earlier.name, "penstock.model_hash", digest)
    mlflow_client.log_metric(earlier.name, "seconds/train", 7500.0)
    mlflow_client.log_metric(earlier.name, "worker_hours/train", 4.25)
    register_stage.run(recipe, workspace)
    page = page_of(workspace, mlflow_client)
    assert "2.08 h*" in page
    assert "4.25 worker-hours in total." in page


def test_an_adapter_goes_along_with_the_model_that_it_is_merged_into(models, trained, recipe):
    workspace = trained(models[1])
    (workspace / "outputs/train/adapter").mkdir()
    write_json(workspace / "outputs/train/adapter/adapter_config.json", {"r": 4})
    TrainRecord.read(workspace).model_copy(update={"adapter": "adapter"}).write(workspace)
    register_stage.run(recipe, workspace)
    folder = registry.download(recipe.registration.model_name)
    assert read_json(folder / "adapter" / "adapter_config.json") == {"r": 4}


def test_transformers_loads_what_is_registered(models, trained, recipe):
    register_stage.run(recipe, trained(models[0]))
    transformers = pytest.importorskip("transformers")
    folder = registry.download(recipe.registration.model_name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("def ", return_tensors="pt")["input_ids"]
    assert model(ids).logits.shape == (1, 4, 257)


def test_a_worse_model_is_refused_and_nothing_is_registered(models, trained, recipe):
    register_stage.run(recipe, trained(models[0]))
    record = register_stage.run(recipe, trained(models[2]))
    assert record.verdict.decision == "refused"
    assert record.verdict.candidate_bits_per_byte > record.verdict.champion_bits_per_byte
    assert record.model.version == 1
    assert len(registry.show(recipe.registration.model_name)) == 1


def test_a_better_model_replaces_the_champion(models, trained, recipe):
    register_stage.run(recipe, trained(models[2]))
    record = register_stage.run(recipe, trained(models[0]))
    assert record.verdict.decision == "promoted"
    assert record.model.version == 2


def test_the_champion_is_put_to_the_recipes_tests_as_well(models, trained, recipe):
    register_stage.run(recipe, trained(models[1]))
    one, other = ({"prompt": "def ", "continuation": a, "wrong": b} for a, b in ("fg", "gf"))
    tests = [
        Behaviour(name="f", kind="minimum_functionality", cases=[each]) for each in (one, other)
    ]
    (test,) = (each for each in tests if run_tests(models[1], [each])[0].passed)
    wanted = recipe.evaluate.model_copy(update={"behaviour": (test,)})
    workspace = trained(models[0])  # to which all is equally likely
    found = {"behaviours": run_tests(models[0], [test])}
    EvaluateRecord.read(workspace).model_copy(update=found).write(workspace)
    record = register_stage.run(recipe.model_copy(update={"evaluate": wanted}), workspace)
    assert record.verdict.decision == "refused"
    assert record.verdict.reason.startswith("fails more of the behavioural tests: f (0 of 1 cases")
    assert record.verdict.comparison.improvement.lower > 0


def test_the_champion_is_put_to_the_tasks_that_the_recipe_limits_once(
    models, trained, recipe, monkeypatch
):
    ran = []

    def run(folder, wanted, *, chat):
        assert wanted.files == ("numbers.yaml",)
        assert not chat
        ran.append(folder)
        return harness.Found(rows=tuple(TaskRow("numbers/acc", str(n), 1.0) for n in range(40)))

    monkeypatch.setattr(harness, "run_harness", run)
    monkeypatch.setattr(comparing, "folder_hash", lambda _: "of the task's folder")
    wanted = recipe.evaluate.model_copy(update={"harness": Harness(files=("numbers.yaml",))})
    limits = (TaskLimit(task="numbers/acc", max_loss=0.1),)
    demands = recipe.registration.model_copy(update={"tasks": limits})
    strict = recipe.model_copy(update={"evaluate": wanted, "registration": demands})
    register_stage.run(recipe, trained(models[1]))  # as a champion of a time without limits
    for _ in range(2):
        workspace = trained(models[0])
        rows = [TaskRow("numbers/acc", str(n), float(n % 2)) for n in range(40)]
        pq.write_table(task_table(rows), workspace / "outputs/evaluate/task_scores.parquet")
        write_json(workspace / "outputs/evaluate/answers.json", [])
        record = register_stage.run(strict, workspace)
        assert record.verdict.decision == "refused"
        assert record.verdict.reason.startswith(
            "worse than register.tasks allows on numbers/acc (0.5000, champion 1.0000, worse on 20 "
            "of 40 questions, better on 0)"
        )
        page = (workspace / "outputs/register" / comparing.PAGE).read_text()
        assert "numbers/acc (worse than allowed)" in page
    assert len(ran) == 1


def turn(record):
    found = record.verdict.comparison.turn
    return found.number, found.uses


def test_candidates_of_one_champion_are_counted_and_a_retry_is_the_same_one(
    models, trained, recipe, mlflow_client
):
    register_stage.run(recipe, trained(models[1]))
    worse = [trained(models[2]) for _ in range(2)]  # two runs that made the same content
    first = register_stage.run(recipe, worse[0])
    assert turn(first) == (1, 1)
    better = register_stage.run(recipe, trained(models[0]))
    assert (better.verdict.decision, turn(better)) == ("promoted", (2, 2))
    assert better.verdict.comparison.confidence > first.verdict.comparison.confidence
    again = register_stage.run(recipe, worse[1])
    assert turn(again) == (1, 3)  # of the new champion, on documents that were used before
    assert register_stage.run(recipe, worse[1]).verdict == again.verdict
    said = "candidate 1 compared with this champion; held-out documents used 3 times"
    assert said in again.verdict.reason and said in page_of(worse[1], mlflow_client)


def test_a_run_that_dies_after_its_turn_finds_it_again(models, trained, recipe, monkeypatch):
    register_stage.run(recipe, trained(models[0]))
    died = trained(models[1])
    with monkeypatch.context() as patch:
        patch.setattr(register_stage, "decide", None)  # the process is gone there
        with pytest.raises(TypeError):
            register_stage.run(recipe, died)
    assert turn(register_stage.run(recipe, trained(models[2]))) == (2, 2)
    assert turn(register_stage.run(recipe, died)) == (1, 1)


def test_a_candidate_that_is_not_compared_has_no_turn(models, trained, recipe):
    strict = recipe.model_copy(
        update={"registration": recipe.registration.model_copy(update={"require_clean": True})}
    )
    register_stage.run(recipe, trained(models[0]))
    register_stage.run(strict, trained(models[1], dirty=True))
    register_stage.run(recipe, trained(models[0]))  # unchanged
    assert turn(register_stage.run(recipe, trained(models[2]))) == (1, 1)


def test_worn_out_documents_are_said_in_the_log_and_on_the_page(
    models, trained, recipe, mlflow_client, caplog
):
    register_stage.run(recipe, trained(models[0]))
    champion = registry.champion(recipe.registration.model_name)
    workspace = trained(models[1])
    scores = pq.read_table(workspace / "outputs/evaluate/scores.parquet")
    for number in range(20):
        take_turn(champion, f"earlier-{number}", scores["doc_id"].to_pylist())
    found = register_stage.run(recipe, workspace)
    said = "the held-out documents have been used for 21 comparisons, more than 20"
    assert said in caplog.text
    assert f"<strong>Warning:</strong> {said}" in page_of(workspace, mlflow_client)
    assert found.verdict.reason.endswith(
        "candidate 21 compared with this champion; held-out documents used 21 times"
    )


def test_after_one_part_of_the_documents_is_worn_out_only_the_next_decides(models, trained, recipe):
    demands = recipe.registration.model_copy(update={"held_out_parts": 2})
    recipe = recipe.model_copy(update={"registration": demands})
    register_stage.run(recipe, trained(models[1]))
    champion = registry.champion(recipe.registration.model_name)
    workspace = trained(models[0])
    ids = pq.read_table(workspace / "outputs/evaluate/scores.parquet")["doc_id"].to_pylist()
    for number in range(20):
        assert take_turn(champion, f"earlier-{number}", ids, parts=2).part == 1
    found = register_stage.run(recipe, workspace).verdict
    fresh = [each for each in ids if part_of(each, 2) == 2]
    assert 0 < found.comparison.documents == len(fresh) < len(ids)
    assert (found.comparison.turn.uses, found.warning) == (1, "")
    scores = pq.read_table(workspace / "outputs/evaluate/scores.parquet")
    of_part = scores.filter(pc.is_in(scores["doc_id"], pa.array(fresh)))
    assert found.candidate_bits_per_byte == bits_per_byte(of_part)


def test_a_judge_is_reported_beside_the_decision_and_asked_once(
    models, trained, recipe, mlflow_client, home
):
    prompts = ["def ", "import "]

    with answering(longer) as (by, seen):
        judged = recipe.model_copy(
            update={
                "evaluate": recipe.evaluate.model_copy(update={"prompts": tuple(prompts)}),
                "registration": recipe.registration.model_copy(update={"judge": by}),
            }
        )

        def wrote(model, texts):
            workspace = trained(model)
            write_text(workspace / "params.yaml", dump_yaml(judged))
            samples = tuple(map("".join, zip(prompts, texts, strict=True)))
            record = EvaluateRecord.read(workspace)
            record.model_copy(update={"samples": samples}).write(workspace)
            return workspace

        first = register_stage.run(judged, wrote(models[1], ["a", "longer"]))
        assert first.verdict.judgement is None  # there was no champion
        write_text(home / "secrets" / "judge-key", "a-key")
        worse = wrote(models[2], ["longer", "longest"])
        verdict = register_stage.run(judged, worse).verdict
        assert verdict.decision == "refused"  # the judge decides nothing
        assert (verdict.judgement.candidate, verdict.judgement.pairs) == (2, 2)
        register_stage.run(judged, worse)
        assert len(seen) == 4
    assert {key for _, key, _ in seen} == {"Bearer a-key"}
    assert "preferred the candidate&#39;s text for 2 of 2 prompts" in page_of(worse, mlflow_client)
    assert mlflow_client.get_run(worse.name).data.metrics["judge/candidate"] == 1.0


def test_the_same_model_from_another_run_is_unchanged(models, trained, recipe):
    register_stage.run(recipe, trained(models[0]))
    record = register_stage.run(recipe, trained(models[0]))
    assert record.verdict.decision == "unchanged"
    assert record.model.version == 1


def test_a_retry_of_the_run_that_promoted_says_so_again(models, trained, recipe):
    register_stage.run(recipe, trained(models[2]))
    workspace = trained(models[0])
    first = register_stage.run(recipe, workspace)
    assert register_stage.run(recipe, workspace) == first
    assert first.verdict.champion_bits_per_byte is not None


def test_missing_scores_of_the_champion_are_computed_once(
    models, trained, recipe, home, monkeypatch
):
    register_stage.run(recipe, trained(models[0]))
    shutil.rmtree(home / "scores")
    record = register_stage.run(recipe, trained(models[2]))
    champion = record.verdict.champion_bits_per_byte
    documents = documents_in(home / "documents")
    assert champion == pytest.approx(bits_per_byte(score_documents(models[0], documents)))
    assert len(list((home / "scores").rglob("*.parquet"))) == 1
    monkeypatch.setattr(registry, "download", None)  # not needed again
    assert register_stage.run(recipe, trained(models[2])).verdict == record.verdict


def test_a_champion_of_another_tokenizer_is_compared_by_the_byte(trained, recipe, home, tmp_path):
    """Two models that guess blindly: one reads letters, one whole words, each of which is rarer."""
    tokenizers = {"letters": character_tokenizer("".join(TEXTS)), "words": train_bpe(TEXTS, 300)}
    bits = {}
    for name, tokenizer in tokenizers.items():
        save_tokenizer(tokenizer, tmp_path / name)
        config = DecoderConfig(
            layers=1,
            width=16,
            heads=2,
            kv_heads=1,
            hidden=32,
            vocab_size=tokenizer.get_vocab_size(),
            context_length=64,
        )
        model = Transformer(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        end = tokenizer.token_to_id("<|endoftext|>")
        save_pretrained(model, tmp_path / name, end_of_text=end)
        tokens = sum(len(tokenizer.encode(text).ids) for text in TEXTS)
        bits[name] = tokens * math.log2(config.vocab_size) / sum(map(len, TEXTS))
    register_stage.run(recipe, trained(tmp_path / "letters"))
    shutil.rmtree(home / "scores")  # the candidate's run scores the champion, as it reads text
    verdict = register_stage.run(recipe, trained(tmp_path / "words")).verdict
    assert tokenizers["words"].get_vocab_size() > 4 * tokenizers["letters"].get_vocab_size()
    assert verdict.champion_bits_per_byte == pytest.approx(bits["letters"], rel=1e-5)
    assert verdict.candidate_bits_per_byte == pytest.approx(bits["words"], rel=1e-5)
    assert verdict.decision == "promoted"


def test_a_champion_that_cannot_be_evaluated_is_not_replaced(models, trained, recipe, home):
    register_stage.run(recipe, trained(models[2]))
    shutil.rmtree(home / "scores")
    (registry.download(recipe.registration.model_name) / "config.json").unlink()
    record = register_stage.run(recipe, trained(models[0]))
    assert record.verdict.decision == "refused"
    assert "version 1, can't be evaluated" in record.verdict.reason


def test_uncommitted_changes_are_refused_where_the_recipe_says_so(models, trained, recipe):
    strict = recipe.model_copy(
        update={"registration": recipe.registration.model_copy(update={"require_clean": True})}
    )
    record = register_stage.run(strict, trained(models[0], dirty=True))
    assert (record.verdict.decision, record.model) == ("refused", None)
    assert "uncommitted" in record.verdict.reason
    assert register_stage.run(strict, trained(models[0])).verdict.decision == "promoted"


def test_a_model_that_only_pleases_its_rewards_is_refused(models, trained, recipe):
    workspace = trained(models[0])
    alarms = ("step 40: answers have 90 tokens, and had 20 at first",)
    TrainRecord.read(workspace).model_copy(update={"alarms": alarms}).write(workspace)
    record = register_stage.run(recipe, workspace)
    assert (record.verdict.decision, record.model) == ("refused", None)
    assert record.verdict.reason == f"training raised an alarm: {alarms[0]}"


def test_a_model_that_is_not_served_as_it_was_trained_is_refused(
    models, trained, recipe, mlflow_client
):
    workspace = trained(models[0])
    sound = ServedCheck(name="files", holds=True, found="21 tensors")
    broken = ServedCheck(name="adapter", holds=False, found="1.5 nats with it, 2.5 merged")
    found = EvaluateRecord.read(workspace).model_copy(update={"served": (sound, broken)})
    found.write(workspace)
    record = register_stage.run(recipe, workspace)
    assert (record.verdict.decision, record.model) == ("refused", None)
    wanted = "the written model is not the trained one: adapter: 1.5 nats with it, 2.5 merged"
    assert record.verdict.reason == wanted
    page = page_of(workspace, mlflow_client)
    assert "What is served is what was trained" in page
    assert "21 tensors" in page


@pytest.fixture
def asking(recipe):
    """The recipe, but a user decides."""
    wanted = recipe.registration.model_copy(update={"needs_approval": True})
    return recipe.model_copy(update={"registration": wanted})


def answer(workspace, approved):
    record = RegisterRecord.read(workspace)
    Answer(
        approved=approved,
        by="ada",
        at="2026-01-01T00:00:00+00:00",
        candidate=record.candidate.version,
        champion=record.model.version if record.model else None,
    ).write(workspace)


def test_a_user_is_asked_about_one_version_and_just_that_one_is_promoted(
    models, trained, recipe, asking, mlflow_client
):
    register_stage.run(recipe, trained(models[2]))
    workspace = trained(models[0])
    asked = register_stage.run(asking, workspace)
    assert (asked.needs_approval, asked.model.version, asked.candidate.version) == (True, 1, 2)
    assert asked.candidate.aliases == ("challenger",)
    assert asked.verdict.reason.endswith("a user must decide")
    assert register_stage.run(asking, workspace) == asked  # a retry makes no second version
    answer(workspace, approved=True)
    promoted = register_stage.run(asking, workspace)
    assert promoted.verdict.decision == "promoted"
    assert promoted.verdict.reason.endswith("approved by ada")
    assert (promoted.model.version, promoted.candidate) == (2, None)
    assert promoted.verdict.champion_bits_per_byte == asked.verdict.champion_bits_per_byte
    assert register_stage.run(asking, workspace) == promoted
    assert len(registry.show(recipe.registration.model_name)) == 2
    assert mlflow_client.get_run(workspace.name).data.tags["penstock.verdict"] == "promoted"


def test_a_users_refusal_leaves_the_champion_and_marks_the_version(models, trained, recipe, asking):
    register_stage.run(recipe, trained(models[2]))
    workspace = trained(models[0])
    register_stage.run(asking, workspace)
    answer(workspace, approved=False)
    refused = register_stage.run(asking, workspace)
    assert (refused.verdict.decision, refused.model.version) == ("refused", 1)
    assert refused.verdict.reason.startswith("refused by ada; better")
    version = registry.find(recipe.registration.model_name, "2")
    assert (version.aliases, version.tags["penstock.verdict"]) == ((), "refused")
    forget_answer(workspace)  # as a user's Clear does
    assert register_stage.run(asking, workspace).needs_approval
    assert len(registry.show(recipe.registration.model_name)) == 2


def test_an_answer_about_another_champion_is_none(models, trained, recipe, asking):
    register_stage.run(recipe, trained(models[2]))
    workspace = trained(models[0])
    register_stage.run(asking, workspace)
    answer(workspace, approved=True)
    register_stage.run(recipe, trained(models[1]))  # another run promotes its model meanwhile
    asked = register_stage.run(asking, workspace)
    assert asked.needs_approval
    assert (asked.candidate.version, asked.model.version) == (2, 3)


def test_no_one_is_asked_about_a_model_that_the_gate_refuses(models, trained, recipe, asking):
    register_stage.run(recipe, trained(models[0]))
    record = register_stage.run(asking, trained(models[2]))
    assert (record.verdict.decision, record.candidate) == ("refused", None)
    assert len(registry.show(recipe.registration.model_name)) == 1


def register_in(recipe, workspace):
    register_stage.run(Recipe.model_validate_json(recipe), workspace)


def test_of_runs_that_register_at_once_each_meets_the_champion_of_the_one_before(
    models, trained, recipe
):
    workspaces = [trained(model) for model in (*models, models[0])]  # two of the same content
    asked = recipe.model_dump_json(by_alias=True)
    started = [start(register_in, asked, each) for each in workspaces]
    assert exit_codes(started) == [0] * len(started)
    decisions = [RegisterRecord.read(each).verdict.decision for each in workspaces]
    versions = registry.show(recipe.registration.model_name)
    assert len(versions) == decisions.count("promoted") >= 1
    assert len({each.model_hash for each in versions}) == len(versions)
    aliases = [("champion",), ("previous",), *[()] * len(versions)]
    assert [each.aliases for each in versions] == aliases[: len(versions)]
    trail = registry.audit_trail(recipe.registration.model_name).entries
    assert [each.after for each in trail] == [each.version for each in reversed(versions)]


def test_a_rollback_while_the_stage_decides_lets_it_decide_anew(
    models, trained, recipe, monkeypatch
):
    name = recipe.registration.model_name
    register_stage.run(recipe, trained(models[2]))
    register_stage.run(recipe, trained(models[1]))
    judge, judged = register_stage._decide_against_champion, []

    def interrupted(recipe, workspace, facts, champion):
        judged.append(champion.version)
        if len(judged) == 1:
            rollback(name, 2, "ada", "it rambles")
        return judge(recipe, workspace, facts, champion)

    monkeypatch.setattr(register_stage, "_decide_against_champion", interrupted)
    record = register_stage.run(recipe, trained(models[0]))
    assert judged == [2, 1]
    assert (record.verdict.decision, record.model.version) == ("promoted", 3)
    last = registry.audit_trail(name).last
    assert (last.before, last.after, last.why) == (1, 3, record.verdict.reason)


def test_what_a_user_promoted_by_hand_is_what_the_next_run_meets(models, trained, recipe):
    name = recipe.registration.model_name
    register_stage.run(recipe, trained(models[2]))
    register_stage.run(recipe, trained(models[1]))
    promote(registry.find(name, "1"), 2, "ada", "safer")
    assert register_stage.run(recipe, trained(models[1])).verdict.decision == "promoted"
    assert registry.find(name, "previous").version == 1


def test_the_lineage_names_all_that_the_model_came_from(
    models, trained, recipe, mlflow_client, home
):
    workspace = trained(models[0], dirty=True)
    product = {"version": "9.8.7", "code": "c0de"}
    run = {"dag_run_id": "small-1", "mlflow_address": "http://mlflow/#/runs/1", "dirty": True}
    run |= {"product": product}
    write_json(workspace / "run.json", read_json(workspace / "run.json") | run)
    (workspace / "uncommitted.diff").write_text("diff --git a/x b/x\n")
    write_json(workspace / "source.json", {"files": 1})
    write_json(
        workspace / "environment.json", {"lock": "10c4", "init_from": "5eed", "adapter": "ada9"}
    )
    write_json(workspace / "jobs/train.json", {"submissions": ["penstock-1-0", "penstock-1-1"]})
    write_json(workspace / "jobs/train.process.json", {"pid": 1})
    write_json(workspace / "diagnostics/machine.json", {"cpu": {"cores": 2, "architecture": "x"}})
    mark_complete(workspace / "checkpoints/step-000010")
    with metered(workspace, "train"):
        pass
    parent = workspace / "parent"
    parent.mkdir()
    (parent / "MLmodel").write_text("model_id: m-1\n")
    started = recipe.model.model_copy(update={"init_from": str(parent)})
    went_on = recipe.adapter.model_copy(update={"init_from": str(parent / "adapter")})
    starts = {"model": started, "adapter": went_on}
    register_stage.run(recipe.model_copy(update=starts), workspace)

    name = recipe.registration.model_name
    facts = read_json(registry.download(name) / "lineage.json")
    assert facts["data_docs"] == "http://mlflow/#/runs/1/artifacts/data_docs/index.html"
    assert facts["ray_jobs"] == {"train": "penstock-1-1"}
    assert facts["trained_on"]["cpu"]["cores"] == 2
    assert facts["checkpoints"]["steps"] == [10]
    adapter = {"folder": str(parent / "adapter"), "content": "ada9", "model_id": None}
    assert facts["parent"] == {
        "folder": str(parent),
        "content": "5eed",
        "model_id": "m-1",
        "adapter": adapter,
    }
    assert facts["run"]["product"] == product
    assert facts["cost"]["train"]["seconds"] >= 0
    assert facts["sha256"]["uncommitted.diff"]
    shown = CliRunner().invoke(app, ["models", "show", f"{name}@1", "--lineage"])
    words = ("c0ffee", "in uncommitted.diff", "small-1", "penstock-1-1", "2 cores", "m-1", "10c4")
    words += ("9.8.7", "c0de", "ada9", "adapter folder")
    assert [word for word in words if word not in shown.stdout] == []
    inputs = mlflow_client.get_run(workspace.name).inputs.dataset_inputs
    assert [each.tags[0].value for each in inputs] == ["training", "validation"]
    assert {each.dataset.digest for each in inputs} == {facts["sha256"]["source.json"][:36]}


def test_the_model_whose_adapters_went_on_is_the_nearer_parent(models, trained, recipe):
    name = recipe.registration.model_name
    for model in (models[2], models[1]):
        register_stage.run(recipe, trained(model))
    base, adapter = (f"models:/{name}@{number}" for number in (1, 2))
    starts = {
        "model": recipe.model.model_copy(update={"init_from": base}),
        "adapter": recipe.adapter.model_copy(update={"init_from": adapter}),
    }
    register_stage.run(recipe.model_copy(update=starts), trained(models[0]))
    child = registry.find(name, "3")
    assert child.parent == f"{name}@2"
    folder = registry.verified_folder(child)
    facts = read_json(folder / "lineage.json")["parent"]
    assert (facts["model"], facts["adapter"]["model"]) == (f"{name}@1", f"{name}@2")
    bill = read_json(folder / "sbom.cdx.json")
    assert {f"{name}@1", f"{name}@2"} <= {each["name"] for each in bill["components"]}


def test_a_crash_behind_the_alias_is_completed_by_the_runs_retry(
    models, trained, recipe, monkeypatch
):
    name = recipe.registration.model_name
    workspace = trained(models[0])
    with monkeypatch.context() as patch:
        patch.setattr(Trail, "finish", None)  # the process is gone there
        with pytest.raises(TypeError):
            register_stage.run(recipe, workspace)
    assert registry.audit_trail(name).unfinished
    assert register_stage.run(recipe, workspace).verdict.decision == "promoted"
    trail = registry.audit_trail(name)
    assert (len(trail.entries), trail.unfinished) == (1, False)


def test_the_registered_model_carries_its_bill_of_materials(models, trained, recipe, monkeypatch):
    monkeypatch.setattr(register_stage, "PRODUCT_FILES", PRODUCT_FILES)
    register_stage.run(recipe, trained(models[0]))
    bill = read_json(registry.download(recipe.registration.model_name) / "sbom.cdx.json")
    assert bill["metadata"]["component"]["version"] == folder_hash(models[0])
    assert {"torch", "mlflow"} <= {each["name"] for each in bill["components"]}
