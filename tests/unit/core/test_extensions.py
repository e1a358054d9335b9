"""Each example of docs/extensions.md, in the place where Penstock calls it."""

import sqlite3

import pytest
import torch
import yaml

from pipelines.core import extensions
from pipelines.core.errors import UserError
from pipelines.data.cleaning.filters import build_filters, first_rejection
from pipelines.data.reading.instruction import Fields
from pipelines.data.reading.source_fingerprint import fingerprint_inputs
from pipelines.data.reading.sources import list_inputs
from pipelines.data.reading.text_readers import plan_reads, read_batch
from pipelines.data.tokens.tokenizer import train_extension
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.reinforcement_section import Reinforcement
from pipelines.recipe.section import Extension
from pipelines.registry.parents import Settled
from pipelines.reinforcement.rewards import rewards_of
from pipelines.stage_cache.used_extensions import extension_fingerprints
from pipelines.stages.beforehand import check_extensions
from tests.team_package import NAME, PAGE, forget_modules, installed_package


@pytest.fixture
def package(tmp_path):
    with installed_package(tmp_path / "package"):
        yield tmp_path / "package"


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "tickets.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE ticket (id, year, changed, text)")
        rows = [
            (n, 2024 + n // 2, "monday", f"The printer on floor {n} is lost.") for n in range(4)
        ]
        connection.executemany("INSERT INTO ticket VALUES (?, ?, ?, ?)", rows)
    return path


@pytest.fixture
def recipe(package, database):
    values = yaml.safe_load((package / "recipes" / "tickets.yaml").read_text())
    values["data"]["source"]["extension"]["settings"]["database"] = str(database)
    return Recipe.model_validate(values)


def test_each_kind_has_an_example_of_twenty_lines(package):
    assert all(extensions.names(kind) for kind in extensions.KINDS)
    for path in (package / NAME).glob("*.py"):
        lines = path.read_text().splitlines()
        assert sum(bool(line.strip()) for line in lines) <= 20, path
    assert "team-nlp" in PAGE.read_text()


def test_a_source_gives_its_documents_and_its_content(recipe, database):
    source = recipe.data.source
    (batch,) = plan_reads(source, list_inputs(source))
    found = list(read_batch(batch, Fields.of(recipe.data)))
    assert [each.source for each in found] == ["2024:1", "2024:2", "2025:1", "2025:2"]
    assert found[2].text == "The printer on floor 2 is lost."
    before = fingerprint_inputs(recipe.data)
    assert fingerprint_inputs(recipe.data) == before
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE ticket SET changed = 'tuesday' WHERE id = 3")
    assert fingerprint_inputs(recipe.data) != before


def test_a_filter_drops_by_its_own_rule(recipe):
    filters = build_filters(recipe.data.filters)
    assert first_rejection(filters, "WHERE IS MY PRINTER") == "quiet:too_loud"
    assert first_rejection(filters, "Where is it?") is None


def test_a_tokenizer_is_trained(recipe):
    texts = ["printer 1234 printer 5678"] * 9
    made = train_extension(recipe.data.tokenizer.extension, texts, 400)
    assert made.encode("1234").tokens == ["1", "2", "3", "4"]
    assert made.decode(made.encode("a printer 12").ids) == "a printer 12"
    with pytest.raises(UserError, match=r"must have at most data.tokenizer.vocab_size = 9"):
        train_extension(recipe.data.tokenizer.extension, texts, 9)


def test_an_expectation_is_held_against_the_texts(recipe):
    import pandas as pd

    from pipelines.validation import suites
    from pipelines.validation.runner import Check, run_check

    (expectation,) = suites._extensions(recipe.validation)
    frame = pd.DataFrame({"text": ["done", "TODO: write this"]})
    (finding,), _ = run_check(Check("texts", "", frame, [expectation]))
    assert not finding.success
    assert finding.bad_rows == (1,)


def test_a_reward_says_what_an_answer_is_worth(package):
    rewards = [{"name": "brief", "settings": {"words": 2}}]
    by = Reinforcement(kind="grpo", rewards=rewards)
    assert [each.name for each in by.of_packages] == ["brief"]
    worth = rewards_of(by)["brief"]
    assert [worth("6 x 7", each, "It is 42") for each in ("42", "It must be 42", "43", "")] == [
        1.0,
        0.5,
        0.0,
        0.0,
    ]


def test_a_metric_measures(recipe, tiny_model):
    from pipelines.stages.evaluate.evaluation import _own_metric

    (metric,) = recipe.evaluate.extensions
    ((name, words),) = _own_metric(metric, tiny_model, ["The printer is lost."] * 2)
    assert name == "brevity/words"
    assert words >= 0


def test_a_task_is_read_with_its_data(package):
    from pipelines.evaluation.harness import read_task

    task = read_task(extensions.load("tasks", "colours"))
    assert task["dataset_kwargs"]["data_files"] == {"test": str(package / NAME / "colours.jsonl")}


@torch.no_grad()
def test_a_family_is_what_transformers_has(recipe, tmp_path):
    from transformers import AutoModelForCausalLM

    from pipelines.models.presets import preset
    from pipelines.models.pretrained import load_pretrained, save_pretrained
    from pipelines.models.transformer import Transformer

    torch.manual_seed(1)
    model = Transformer(preset(recipe.model.preset).sized(61, 24)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.2)
    save_pretrained(model, tmp_path / "model", end_of_text=0)
    folder, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(0, 61, (2, 24))
    expected = folder.eval()(tokens).logits
    again = load_pretrained(tmp_path / "model").eval()
    assert again.config == model.config
    for each in (model, again):
        torch.testing.assert_close(each(tokens), expected, atol=1e-4, rtol=0)


def test_an_accelerator_is_found_by_both_names(package):
    from pipelines.planning.hardware_table import entries, named, of_driver

    assert of_driver("Acme X1") is named("acme-x1") is entries()["acme-x1"]
    assert named("h100").memory_bytes < named("acme-x1").memory_bytes


def test_an_export_is_written(package, tiny_model, tmp_path):
    import numpy as np

    extensions.load("exports", "numpy")(tiny_model, tmp_path)
    assert "model.embed_tokens.weight" in np.load(tmp_path / "weights.npz")


def test_only_the_stages_that_use_an_extension_have_it_in_their_keys(recipe, package):
    keys = extension_fingerprints(recipe)
    assert {stage: set(each) for stage, each in keys.items()} == {
        "preprocess": {"sources/tickets", "filters/quiet", "tokenizers/digits"},
        "validate": {"expectations/no-todo"},
        "train": {"families/starcoder2", "accelerators/acme-x1"},
        "evaluate": {"families/starcoder2", "metrics/brevity", "tasks/colours"},
    }
    assert extension_fingerprints(recipe) == keys
    for changed in ("filters.py", "colours.jsonl"):
        with (package / NAME / changed).open("a") as file:
            file.write("\n")
        after = extension_fingerprints(recipe)
        assert after["preprocess"]["filters/quiet"] != keys["preprocess"]["filters/quiet"]
        keys = after
    plain = Recipe(name="plain")
    assert extension_fingerprints(plain)["preprocess"] == {}


def test_what_the_package_requires_counts_too(recipe, package):
    before = extension_fingerprints(recipe)
    metadata = next(package.glob("*.dist-info")) / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: numpy\n")
    extensions._installed.cache_clear()
    assert extension_fingerprints(recipe) != before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"data": {"filters": {"extensions": [{"name": "loud"}]}}},
            "no installed package has an extension 'loud' in the group penstock.filters; "
            "installed are quiet; install its package wherever Airflow and Ray run",
        ),
        (
            {"data": {"filters": {"extensions": [{"name": "quiet", "settings": {"least": 1}}]}}},
            "the extension quiet of penstock.filters refuses: .* unexpected keyword argument",
        ),
        (
            {"model": {"preset": "starcoder3/tiny"}},
            "no installed package has an extension 'starcoder3' in the group penstock.families",
        ),
    ],
)
def test_a_mistake_is_told_before_a_run(package, change, told):
    wrong = Recipe.model_validate({"name": "wrong", **change})
    with pytest.raises(UserError, match=told):
        check_extensions(Settled(wrong, wrong, {}))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ({"kind": "extension"}, "kind `extension` needs data.source.extension"),
        ({"extension": {"name": "tickets"}}, "but kind is `stdlib`; set kind to extension"),
        (
            {"kind": "extension", "extension": {"name": "a", "settings": {"at": "db://u:p@h"}}},
            "the URL in the setting at of a holds a password",
        ),
    ],
)
def test_a_recipe_names_it_in_one_way(source, told):
    with pytest.raises(ValueError, match=told):
        Recipe.model_validate({"name": "wrong", "data": {"source": source}})


@pytest.mark.parametrize(
    ("code", "told"),
    [("import nowhere", "ModuleNotFoundError: .* 'nowhere'"), ("1 / 0", "ZeroDivisionError: div")],
)
def test_an_extension_that_cannot_be_imported_is_named(package, code, told):
    (package / NAME / "filters.py").write_text(code)
    with pytest.raises(UserError, match=f"quiet of team-nlp 1.0 can't be imported .*: {told}"):
        extensions.load("filters", "quiet")


WRONG = {
    "sources": ("class Tickets:\n    shards = []", "the class Tickets", "a class with the methods"),
    "filters": ("def Quiet(): ...", "the function Quiet()", "a class with the method reject"),
    "tokenizers": ("single_digits = 'bpe'", "of the type str", "a function of texts and a vocab"),
    "expectations": ("class ExpectNoTodo: ...", "the class ExpectNoTodo", "a subclass of Great"),
    "rewards": (
        "def brief(answer): ...",
        "the function brief(answer)",
        "a function of prompt, answ",
    ),
    "metrics": ("brevity = 0.5", "of the type float", "a function of a model's folder and texts"),
    "tasks": (
        "from pathlib import Path\nCOLOURS = Path('none')",
        "the path none",
        "the Path of an",
    ),
    "families": ("STARCODER2 = {}", "of the type dict", "a pipelines.models.families.Family"),
    "accelerators": ("class ACME_X1: ...", "the class ACME_X1", "a pipelines.planning.hardware"),
    "exports": (
        "def numpy_arrays(source): ...",
        "the function numpy_arrays(source)",
        "a function of a model's folder and an empty one",
    ),
}


@pytest.mark.parametrize("kind", extensions.KINDS)
def test_what_an_entry_point_must_be_is_told_in_one_line(package, kind):
    code, found, must = WRONG[kind]
    (package / NAME / f"{kind}.py").write_text(code)
    (name,) = extensions.names(kind)
    with pytest.raises(UserError) as refused:
        extensions.load(kind, name)
    told = str(refused.value)
    assert told.startswith(f"the entry point {name} = {NAME}.{kind}:")
    assert f" of team-nlp 1.0 in the group penstock.{kind} is {found}; it must be {must}" in told
    assert "\n" not in told


# An export is named by a command, and the recipe learns from no rewards.
NAMED = [kind for kind in extensions.KINDS if kind not in ("exports", "rewards")]


@pytest.mark.parametrize("kind", NAMED)
def test_each_kind_that_a_recipe_names_is_checked_before_a_run(recipe, package, kind):
    check_extensions(Settled(recipe, recipe, {}))
    forget_modules()
    (package / NAME / f"{kind}.py").write_text(WRONG[kind][0])
    with pytest.raises(UserError, match=f"in the group penstock.{kind} is "):
        check_extensions(Settled(recipe, recipe, {}))


def test_settings_are_arguments():
    assert Extension(name="a", settings={"b": 1}) == Extension(name="a", settings={"b": 1})
    with pytest.raises(
        UserError, match=r"the extension a of penstock.sources refuses: no such year"
    ):
        extensions.call("sources", "a", _refuse)


def _refuse():
    raise ValueError("no such year")
