"""`penstock models export` on a real registry and a workspace of a few documents."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import yaml
from gguf import GGUFReader
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.core import extensions
from pipelines.core.errors import UserError
from pipelines.core.storage import read_json, write_json
from pipelines.data.documents import DocumentWriter
from pipelines.data.normalize import Document
from pipelines.evaluation.bootstrap import bits_per_byte
from pipelines.evaluation.perplexity import score_documents
from pipelines.registry import registry
from pipelines.registry.promotion import promote
from pipelines.registry.registration import register
from pipelines.run.records import (
    DatasetRef,
    EvaluateRecord,
    PreprocessRecord,
    Split,
    output_folder,
)
from pipelines.run.workspace import Run, workspace_path
from pipelines.stages.held_out import read_held_out
from pipelines.tracking.tracked_run import MODEL_HASH_TAG
from tests.team_package import installed_package
from tests.unit.export.models import small, write_registered

TEXTS = [f"def f{number}(x):\n    return x * {number}\n" for number in range(8)]
RUN = Run(dag_run_id="manual__1", git_commit="c", dirty=False, recipe_fingerprint="f")


def write_workspace(workspace: Path, texts: list[str]) -> None:
    documents = output_folder(workspace, "preprocess") / "documents"
    documents.mkdir(parents=True)
    with DocumentWriter(documents / "validation-00000.parquet") as writer:
        for text in texts:
            doc_id = hashlib.sha256(text.encode()).hexdigest()
            writer.add(Document(doc_id=doc_id, source="s", text=text, bytes=len(text)))
    split = Split(documents=len(texts), bytes=1, tokens=1, shards=())
    dataset = DatasetRef(vocab_size=257, train=split, validation=split)
    PreprocessRecord(dataset=dataset, stats={}).write(workspace)
    (workspace / "params.yaml").write_text(yaml.safe_dump({"name": "r"}))


@pytest.fixture
def model(home, mlflow_run, tmp_path):
    """A registered version whose run's workspace is there."""
    write_workspace(workspace_path(home / "runs", RUN.dag_run_id), TEXTS)
    folder = write_registered(small(), tmp_path / "registered")
    ids = sorted(hashlib.sha256(text.encode()).hexdigest() for text in TEXTS)
    record = EvaluateRecord(
        bits_per_byte=0.0,
        perplexity=1.0,
        documents=len(TEXTS),
        bytes=sum(map(len, TEXTS)),
        data_hash=hashlib.sha256("\n".join(ids).encode()).hexdigest(),
        baselines={},
        samples=(),
    )
    facts = {"run": RUN.model_dump(), "records": {"evaluate": record.model_dump(mode="json")}}
    write_json(folder / "lineage.json", facts)
    documents = read_held_out(folder, home / "runs").documents
    measured = bits_per_byte(score_documents(folder, documents))
    facts["records"]["evaluate"]["bits_per_byte"] = measured
    write_json(folder / "lineage.json", facts)
    name = f"exported-{tmp_path.name}"
    version = register([folder], name, mlflow_run, {MODEL_HASH_TAG: "aa"}, "the first")
    promote(version, None, "ada", "the first")
    return name


def penstock(*arguments):
    return CliRunner().invoke(app, ["models", "export", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("form", ["int8", "int4", "vllm-int4"])
def test_what_is_printed_is_what_the_written_folder_is_worth(form, model, tmp_path):
    to = tmp_path / "to"
    result = penstock(
        f"{model}@champion", "--format", form, "--to", str(to), "--group-size", "32", "--json"
    )
    said = json.loads(result.stdout)
    held_out = read_held_out(registry.download(model), tmp_path / "home" / "runs")
    assert said["model"] == f"{model}@1"
    assert said["bits_per_byte"] == bits_per_byte(score_documents(to, held_out.documents))
    assert said["registered_bits_per_byte"] == held_out.bits_per_byte
    assert said["bits_per_byte"] == pytest.approx(held_out.bits_per_byte, rel=0.1)
    assert said["bytes"] == sum(path.stat().st_size for path in to.iterdir())
    assert said["bytes"] < said["registered_bytes"]


def test_a_user_reads_size_and_loss(model, tmp_path):
    result = penstock(model, "--format", "int8", "--to", str(tmp_path / "to"))
    first, size, score, serve = result.stdout.splitlines()
    assert first.startswith(f"{model}@1 as int8 in ")
    assert "kB (registered weights " in size
    assert "bits per byte" in score
    assert "same held-out documents" in score
    began, *_, ended = [line for line in result.stderr.splitlines() if "KiB scored" in line]
    assert began == "int8 0/0 KiB scored"
    assert ended.endswith(" s left")
    assert serve.split() == ["serve", "vllm", "serve", str(tmp_path / "to")]


@pytest.mark.parametrize("form", ["huggingface", "bf16"])
def test_a_plain_copy_needs_no_held_out_documents(form, model, tmp_path):
    shutil.rmtree(tmp_path / "home" / "runs")
    said = json.loads(
        penstock(f"{model}@1", "--to", str(tmp_path / "to"), "--format", form, "--json").stdout
    )
    assert said["bits_per_byte"] is None
    assert (tmp_path / "to" / "lineage.json").is_file()


@pytest.mark.parametrize(("form", "kind"), [("gguf", 0), ("gguf-f16", 1)])
def test_a_file_for_llama_cpp_needs_no_held_out_documents(form, kind, model, tmp_path):
    shutil.rmtree(tmp_path / "home" / "runs")
    to = tmp_path / "to"
    result = penstock(model, "--to", str(to), "--format", form)
    serve = result.stdout.splitlines()[-1].split()
    assert serve[:3] == ["serve", "llama-server", "--model"]
    assert serve[3:] == [str(to / "model.gguf"), "--ctx-size", "32"]
    fields = GGUFReader(to / "model.gguf").fields
    assert fields["general.name"].contents() == f"{model}@1"
    assert fields["general.file_type"].contents() == kind


def test_a_file_in_8_bits_is_scored_by_a_copy_with_its_numbers(model, tmp_path):
    to = tmp_path / "to"
    said = json.loads(penstock(model, "--format", "gguf-q8_0", "--to", str(to), "--json").stdout)
    lost = said["bits_per_byte"] - said["registered_bits_per_byte"]
    assert 0 < abs(lost) < 0.02 * said["registered_bits_per_byte"]
    assert said["context_length"] == 32
    assert said["bytes"] < said["registered_bytes"] / 3
    assert {path.name for path in to.iterdir()} == {"model.gguf", "README.md", "lineage.json"}


def test_what_a_teams_package_writes_says_which_code_made_it(model, tmp_path):
    to = tmp_path / "to"
    with installed_package(tmp_path / "package"):
        said = json.loads(penstock(model, "--format", "numpy", "--to", str(to), "--json").stdout)
        code = extensions.fingerprint("exports", "numpy")
    assert (said["package"], said["fingerprint"]) == ("team-nlp 1.0", code)
    assert read_json(to / "penstock-export.json") == {
        "model": f"{model}@1",
        "format": "numpy",
        "package": "team-nlp 1.0",
        "fingerprint": code,
    }
    assert (to / "weights.npz").is_file()


@pytest.mark.parametrize("form", ["triton", "triton-stream", "triton-vllm"])
def test_a_version_goes_into_tritons_repository_under_its_number(form, model, tmp_path):
    to = tmp_path / "repository"
    result = penstock(model, "--format", form, "--to", str(to))
    assert f"serve  tritonserver --model-repository {to}" in result.stdout
    assert (to / model / "1" / "model" / "model.safetensors").is_file()
    with pytest.raises(UserError, match="exists already"):
        penstock(model, "--format", form, "--to", str(to))


def test_a_budget_chooses_the_variant_and_leaves_only_it(model, tmp_path):
    arguments = ["--group-size", "32", "--sequences", "1", "--max-loss", "1"]
    to = tmp_path / "to"
    said = penstock(model, "--to", str(to), "--budget-gb", "1", *arguments, "--json")
    result = json.loads(said.stdout)
    variants = {each["variant"]["name"]: each for each in result["variants"]}
    assert list(variants) == ["bf16", "int8", "int4"]
    best = min(variants.values(), key=lambda each: each["variant"]["bits_per_byte"])
    assert result["format"] == best["variant"]["name"]
    assert result["bits_per_byte"] == best["variant"]["bits_per_byte"]
    assert all(path.is_file() for path in to.iterdir())
    held_out = read_held_out(registry.download(model), tmp_path / "home" / "runs")
    assert bits_per_byte(score_documents(to, held_out.documents)) == result["bits_per_byte"]
    table = said.stderr.splitlines()
    assert "of 1 GB, 1 x 32 tokens at once:" in table
    assert len([line for line in table if line.endswith(" s")]) == 3


def test_no_variant_in_a_budget_is_one_line_with_its_numbers(model, tmp_path):
    with pytest.raises(UserError, match=r"no variant fits 1e-05 GB .*bf16 needs .*int4 needs"):
        penstock(model, "--to", str(tmp_path / "to"), "--budget-gb", "1e-5", "--group-size", "32")
    assert not (tmp_path / "to").exists()
    with pytest.raises(UserError, match="not both"):
        penstock(model, "--to", str(tmp_path), "--budget-gb", "1", "--format", "int8")


def test_without_the_documents_nothing_is_left_and_one_line_says_what_to_do(model, tmp_path):
    shutil.rmtree(tmp_path / "home" / "runs")
    with pytest.raises(UserError, match=r"are gone; give --workspace"):
        penstock(model, "--format", "int8", "--to", str(tmp_path / "to"))
    assert not (tmp_path / "to").exists()
    write_workspace(tmp_path / "other", TEXTS)
    arguments = ["--format", "int8", "--to", str(tmp_path / "to"), "--json"]
    with_others = penstock(model, *arguments, "--workspace", str(tmp_path / "other"))
    assert json.loads(with_others.stdout)["bits_per_byte"] > 0


def test_other_documents_are_refused(model, tmp_path):
    write_workspace(tmp_path / "other", TEXTS[1:])
    arguments = ["--format", "int8", "--to", str(tmp_path / "to")]
    with pytest.raises(UserError, match="the model was not measured on this"):
        penstock(model, *arguments, "--workspace", str(tmp_path / "other"))


def test_a_model_that_was_never_measured_is_one_line(tmp_path):
    folder = write_registered(small(), tmp_path / "registered")
    with pytest.raises(UserError, match="does not say what the model was measured on"):
        read_held_out(folder, tmp_path)


def test_the_registered_folder_is_left_as_it_was(model, tmp_path):
    source = registry.download(model)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    penstock(model, "--format", "int8", "--to", str(tmp_path / "to"))
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert read_json(tmp_path / "to" / "lineage.json") == read_json(source / "lineage.json")
