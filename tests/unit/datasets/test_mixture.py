"""Versions that are trained on together: settled, and refused before anything is fetched.

Their way through the stages is in tests/integration/test_mixture_stages.py.
"""

import pytest

from pipelines.core.errors import UserError
from pipelines.core.storage import write_json
from pipelines.datasets.dataset_publishing import make
from pipelines.datasets.fetching import fetch_dataset
from pipelines.datasets.mixture import describe_mixture, find_mixture
from pipelines.datasets.run_source import settle
from pipelines.recipe.recipe_files import load_recipe
from tests.unit.datasets.dataset_workspace import make_workspace

TEXT = "some text\n" * 40


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    for variable in ("PENSTOCK_DATASETS_URL", "PENSTOCK_DATASETS_REMOTE"):
        monkeypatch.delenv(variable, raising=False)
    make(make_workspace(tmp_path / "web", TEXT, name="web"))
    return tmp_path / "home"


def of(weights: str, *overrides: str):
    mixture = ["data.source.kind=mixture", f"data.source.mixture={weights}"]
    return load_recipe("debug", [*mixture, *overrides])


def test_names_become_versions_and_stay_those(tmp_path):
    make(make_workspace(tmp_path / "code", TEXT + "x", name="code"))
    recipe, facts = settle(of("{web: 2, code: 1}"))
    make(make_workspace(tmp_path / "next", TEXT + "more\n", name="web"))
    assert settle(recipe) == (recipe, facts)
    assert list(settle(of("{web: 2, code: 1}"))[0].data.source.mixture) == ["code@1", "web@2"]


def test_data_keys_are_those_of_the_first_version_but_how_they_are_read(tmp_path):
    """Versions may have been cleaned differently; the record holds each one's own keys."""
    made_with = ("data.pii.action=report", "data.source.text_field=body")
    make(make_workspace(tmp_path / "code", TEXT + "x", *made_with, name="code"))
    recipe, _ = settle(of("{web: 2, code: 1}", "data.document_mask=true", "train.steps=9"))
    assert (recipe.data.pii.action, recipe.data.source.text_field) == ("report", "body")
    assert (recipe.data.document_mask, recipe.train.steps) == (True, 9)


def test_a_loss_mask_of_only_one_is_refused(tmp_path):
    make(make_workspace(tmp_path / "chats", TEXT, name="chats", masked=True))
    with pytest.raises(UserError, match=r"chats@1 and web@1 differ in their loss mask \(one, none"):
        settle(of("{web: 1, chats: 1}"))


def test_pairs_are_mixed_with_pairs_alone(tmp_path):
    for name in ("liked", "ranked"):
        make(make_workspace(tmp_path / name, TEXT, name=name, pairs=True))
    mixed = find_mixture(of("{liked: 1, ranked: 2}").data.source)
    assert describe_mixture(mixed, [version.dataset for version, _ in mixed]).pairs
    with pytest.raises(UserError, match=r"liked@1 and web@1 differ in their documents \(pairs"):
        settle(of("{web: 1, liked: 1}"))
    labelled = mixed[0][0].dataset.model_copy(update={"labelled": True})
    assert labelled.contents == "labelled answers"  # which are not mixed with pairs either


def test_a_version_of_pairs_is_read_document_by_document(tmp_path):
    made_with = (
        "data.instruction.kind=preference",
        "preference.kind=simpo",
        "data.packing=best_fit",
        "data.document_mask=true",
    )
    make(make_workspace(tmp_path / "liked", TEXT, *made_with, name="liked", pairs=True))
    asked = ["data.source.kind=dataset", "data.source.path=liked", "preference.kind=simpo"]
    recipe, _ = settle(load_recipe("debug", [*asked, "data.document_mask=true"]))
    assert recipe.data.instruction.is_preference
    with pytest.raises(UserError, match=r"liked@1: .*set .* data\.document_mask to true"):
        settle(load_recipe("debug", asked))


def test_a_dataset_that_is_not_there_is_one_line():
    with pytest.raises(UserError, match="no dataset is named 'nosuch'"):
        settle(of("{web: 1, nosuch: 1}"))


def test_a_version_that_was_moved_since_the_run_began_is_refused(tmp_path):
    make(make_workspace(tmp_path / "code", TEXT + "x", name="code"))
    recipe, facts = settle(of("{web: 2, code: 1}"))
    facts["mixture"][1]["directory_hash"] = "other.dir"
    write_json(tmp_path / "run/source.json", facts)
    with pytest.raises(UserError, match="web@1 is another than when this run began"):
        fetch_dataset(recipe, tmp_path / "run")
