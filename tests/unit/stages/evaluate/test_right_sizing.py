"""With a memory budget: the form that fits is measured, compared, registered and scored again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.core.storage import folder_hash, write_json
from pipelines.evaluation.bootstrap import bits_per_byte
from pipelines.evaluation.generate import generate
from pipelines.evaluation.held_out_documents import read_documents
from pipelines.evaluation.perplexity import score_documents
from pipelines.export.hf_folder import export_bf16
from pipelines.export.program import export_program
from pipelines.models.pretrained import save_pretrained
from pipelines.models.served import TransformersModel, held_model, load_model
from pipelines.models.transformer import Transformer
from pipelines.platform.garbage_collection import aliased_models
from pipelines.recipe.recipe import Recipe
from pipelines.registry import registry
from pipelines.run.records import EvaluateRecord, TrainRecord, output_folder
from pipelines.run.verdict import RightSize
from pipelines.serving.serving_engine import start_engine
from pipelines.stages.evaluate import evaluation
from pipelines.stages.register import register_stage
from tests.unit.export.models import small
from tests.unit.stages.evaluate.test_evaluation import make_workspace

torch.set_num_threads(1)
CPU = torch.device("cpu")


def recipe(name: str = "sized", **options: Any) -> Recipe:
    wanted = {"sample_tokens": 4, "budget_gb": 1.0, "budget_max_loss": 1.0, "int4_group": 32}
    sections = {"evaluate": wanted | options, "register": {"model_name": name}}
    return Recipe.model_validate({"name": "sized", **sections})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace that has trained a model which is sure of its guesses, so rounding shows."""
    workspace = make_workspace(tmp_path_factory.mktemp("made") / "workspace")
    folder = output_folder(workspace, "train") / "model"
    save_pretrained(small(), folder, end_of_text=256)
    trained = TrainRecord.read(workspace)
    trained.model_copy(update={"model_hash": folder_hash(folder)}).write(workspace)
    return workspace


@pytest.fixture
def workspace(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "workspace"))


@pytest.fixture(scope="module")
def sizes(made: Path) -> RightSize:
    evaluation.run(recipe(), made)
    found = EvaluateRecord.read(made).right_size
    assert found is not None
    shutil.rmtree(output_folder(made, "evaluate"))
    return found


def budget_for(sizes: RightSize, form: str) -> float:
    """Gigabytes that this form and smaller ones fit, and no larger one."""
    (size,) = (each.serving_bytes for each in sizes.forms if each.form == form)
    return size / 0.9e9 * 1.0001


def test_every_form_is_measured_and_smaller_ones_serve_in_less(sizes: RightSize) -> None:
    assert [each.form for each in sizes.forms] == ["bf16", "int8", "int4"]
    serving = [each.serving_bytes for each in sizes.forms]
    assert serving == sorted(serving, reverse=True)
    bf16, int8, int4 = (each.bits_per_byte for each in sizes.forms)
    assert abs(bf16 - sizes.trained_bits_per_byte) < abs(int4 - sizes.trained_bits_per_byte)
    assert len({bf16, int8, int4, sizes.trained_bits_per_byte}) == 4
    assert (sizes.tokens, sizes.sequences) == (32, 8)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_all_that_is_measured_is_of_the_form_that_fits(
    workspace: Path, sizes: RightSize, form: str
) -> None:
    record = evaluation.run(recipe(budget_gb=budget_for(sizes, form)), workspace)
    found = record.right_size
    assert found is not None
    assert found.chosen is not None
    assert found.chosen.form == form
    model = output_folder(workspace, "evaluate") / "model"
    assert found.model_hash == folder_hash(model)
    held_out = output_folder(workspace, "preprocess") / "documents"
    documents = read_documents(held_out, "validation", 2_000_000)
    expected = score_documents(model, documents)
    assert isinstance(held_model(model), TransformersModel)
    scores = pq.read_table(output_folder(workspace, "evaluate") / "scores.parquet")
    assert scores["nats"].equals(expected["nats"])
    assert record.bits_per_byte == found.chosen.bits_per_byte == bits_per_byte(expected)
    assert record.bits_per_byte != found.trained_bits_per_byte
    (sample,) = generate(model, ["def "], 4, temperature=0.7, seed=42)
    assert record.samples[0] == f"def {sample}"
    assert not (workspace / "forms").exists()
    seconds = json.loads((workspace / "diagnostics/load_seconds.json").read_text())
    assert set(seconds) == {"bf16", "int8", "int4"}
    assert (workspace / "diagnostics/right_size.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_work_gives_the_same_bytes(workspace: Path, sizes: RightSize) -> None:
    wanted = recipe(budget_gb=budget_for(sizes, "int4"))
    output = output_folder(workspace, "evaluate")
    (workspace / "forms" / "bf16").mkdir(parents=True)  # left by a try that was cut off
    hashes = set()
    for _ in range(2):
        evaluation.run(wanted, workspace)
        (output / "report.html").unlink()
        hashes.add(folder_hash(output))
    assert len(hashes) == 1


def test_where_none_fits_the_gate_refuses_with_every_number(
    workspace: Path, sizes: RightSize, name: str
) -> None:
    write_json(workspace / "run.json", {"dirty": False, "git_commit": "c0ffee"})
    wanted = recipe(name, budget_gb=budget_for(sizes, "int4"), budget_max_loss=1e-9)
    measured = evaluation.run(wanted, workspace)
    assert measured.bits_per_byte == sizes.trained_bits_per_byte
    record = register_stage.run(wanted, workspace)
    assert (record.verdict.decision, record.model) == ("refused", None)
    line = record.verdict.reason
    assert line.startswith("evaluate.budget_gb: no variant fits ")
    for each in sizes.forms:
        assert (
            f"{each.form} needs {each.serving_bytes / 1e9:.3g} GB and loses {each.lost:+.4f}"
            in line
        )


def test_what_is_registered_is_the_form_and_it_is_scored_as_it_is_served(
    workspace: Path, sizes: RightSize, name: str, home: Path
) -> None:
    write_json(workspace / "run.json", {"dirty": False, "git_commit": "c0ffee"})
    wanted = recipe(name, budget_gb=budget_for(sizes, "int8"))
    measured = evaluation.run(wanted, workspace)
    record = register_stage.run(wanted, workspace)
    assert record.verdict.decision == "promoted"
    assert "; served as int8: " in record.verdict.reason
    version = registry.find(name)
    folder = registry.verified_folder(version)
    assert "quantization_config" in json.loads((folder / "config.json").read_text())
    assert version.model_hash == measured.right_size.model_hash  # type: ignore[union-attr]
    assert float(version.tags["penstock.bits_per_byte"]) == measured.bits_per_byte
    assert {version.model_hash, TrainRecord.read(workspace).model_hash} <= aliased_models()
    kept = json.loads((folder / "lineage.json").read_text())["records"]["evaluate"]["right_size"]
    assert RightSize.model_validate(kept) == measured.right_size

    # A run of the same weights in another form meets the champion's own scores, made anew.
    shutil.rmtree(home / "scores")
    other = Path(shutil.copytree(workspace, workspace.parent / "other"))
    shutil.rmtree(output_folder(other, "evaluate"))
    smaller = recipe(name, budget_gb=budget_for(sizes, "int4"))
    candidate = evaluation.run(smaller, other)
    verdict = register_stage.run(smaller, other).verdict
    assert verdict.candidate_bits_per_byte == candidate.bits_per_byte != measured.bits_per_byte
    assert verdict.champion_bits_per_byte == measured.bits_per_byte


def test_a_folder_says_how_it_is_computed(made: Path, sizes: RightSize, tmp_path: Path) -> None:
    trained = output_folder(made, "train") / "model"
    assert isinstance(load_model(trained, CPU), Transformer)
    export_bf16(trained, tmp_path)
    assert isinstance(load_model(tmp_path, CPU), TransformersModel)


def test_a_quantised_model_is_not_rounded_or_traced_again(
    workspace: Path, sizes: RightSize, tmp_path: Path
) -> None:
    evaluation.run(recipe(budget_gb=budget_for(sizes, "int8")), workspace)
    model = output_folder(workspace, "evaluate") / "model"
    with pytest.raises(UserError, match="quantised already"):
        export_bf16(model, tmp_path)
    with pytest.raises(UserError, match="quantised already"):
        export_program(model, tmp_path, "onnx")


def test_int4_is_not_served_where_nothing_computes_with_it(
    workspace: Path, sizes: RightSize, tmp_path: Path
) -> None:
    evaluation.run(recipe(budget_gb=budget_for(sizes, "int4")), workspace)
    model = output_folder(workspace, "evaluate") / "model"
    with pytest.raises(UserError, match=r"m@1 has int4 weights, .* package mslk"):
        start_engine("m", 1, model, tmp_path)
