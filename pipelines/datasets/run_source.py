"""Which data a run uses, settled before it begins: they decide the stage cache's keys.

A source of text is fingerprinted where it lies. A dataset version is named once and for all, and
brings the data section of the recipe that made it; of a mixture the first does, by label.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.core.checked_yaml import read_yaml
from pipelines.core.settings import load_settings
from pipelines.data.reading.source_fingerprint import fingerprint_inputs
from pipelines.datasets.dataset_publishing import source_summary
from pipelines.datasets.mixture import Weighted, find_mixture
from pipelines.datasets.versions import STREAMED, DatasetVersion, find
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import get_dotted, parse_recipe
from pipelines.run.records import PreprocessRecord
from pipelines.stage_cache.used_extensions import extension_fingerprints

_OF_TRAINING = ("document_mask", "reader")  # how a dataset is read, whatever it was made with


def settle(recipe: Recipe) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe that will run, and what its `source.json` holds.

    Raises:
        UserError: the source or a dataset version does not exist, or versions can't be mixed.
    """
    source = recipe.data.source
    if not source.is_published:
        return recipe, fingerprint_inputs(recipe.data)
    reading = {
        "remote": load_settings().datasets_remote,  # which preprocess writes in its record
        "token_shards": "streamed" if recipe.data.reader == STREAMED else "fetched",
    }
    if source.kind == "mixture":
        mixed = find_mixture(source)
        facts = [_identity(version) | {"weight": weight} for version, weight in mixed]
        return _with_mixture(recipe, mixed), {"mixture": facts} | reading
    version = find(str(source.path))
    return with_dataset(recipe, version), _identity(version) | reading


def _identity(version: DatasetVersion) -> dict[str, str]:
    return {
        "dataset": version.label,
        "directory_hash": version.directory_hash,
        "git_revision": version.git_revision,
    }


def recipe_of(version: DatasetVersion) -> Recipe:
    """Return the recipe that a version was made with, to be run on that version."""
    return with_dataset(parse_recipe(version.recipe, where=version.label), version)


def with_dataset(recipe: Recipe, version: DatasetVersion) -> Recipe:
    """Return the recipe with a version's data: how they were made is the version's, how they are
    read is the recipe's."""
    return _with_data(recipe, version, {"kind": "dataset", "path": version.label})


def _with_mixture(recipe: Recipe, mixed: Sequence[Weighted]) -> Recipe:
    weights = {version.label: weight for version, weight in mixed}
    first, _ = mixed[0]
    return _with_data(recipe, first, {"kind": "mixture", "path": None, "mixture": weights})


def _with_data(recipe: Recipe, version: DatasetVersion, source: dict[str, Any]) -> Recipe:
    made: dict[str, Any] = version.recipe["data"]
    asked = recipe.to_dict()["data"]
    # A best-fit sample was packed to one length; any length can be cut from documents end to end.
    kept = _OF_TRAINING if made["packing"] == "best_fit" else (*_OF_TRAINING, "sequence_length")
    data = made | {key: asked[key] for key in kept}
    data["source"] = made["source"] | source
    return parse_recipe(recipe.to_dict() | {"data": data}, where=version.label)


def unchanged(version: DatasetVersion, recipe: Recipe, source: dict[str, Any], dvc: Path) -> bool:
    """Return whether a version holds just this source, made just so.

    What makes data differ are the code of a team's own extensions, and the parameters of
    *preprocess*, which `dvc` (dvc.yaml) lists.
    """
    made_by = extension_fingerprints(recipe)[PreprocessRecord.stage]
    if (version.source, version.extensions) != (source_summary(source), made_by):
        return False
    stage = read_yaml(dvc)["stages"][PreprocessRecord.stage]
    keys = stage["params"][0]["params.yaml"]
    try:
        return all(
            get_dotted(version.recipe, key) == get_dotted(recipe.to_dict(), key) for key in keys
        )
    except KeyError:  # a version from before one of today's parameters
        return False
