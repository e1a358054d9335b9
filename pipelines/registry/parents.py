"""The registered models that a run starts from: named once and for all, fetched and verified.

A recipe may say `models:/NAME@champion`. The run's own recipe says `models:/NAME@7`, so all its
stages start from one version, whatever is promoted meanwhile. A stage that reads the weights gets
the same recipe with their folder.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError
from pipelines.datasets.run_source import settle
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.section import REGISTERED, registered_label
from pipelines.registry import registry

ADAPTER = "adapter"  # in a registered folder: the adapters that were merged into its weights


@dataclass(frozen=True)
class Settled:
    """A run's inputs, chosen before it begins.

    Attributes:
        recipe: As it is recorded, with the version of each registered model and dataset.
        ready: The same with the folders of registered models, to be checked and run here.
        source: The content of the run's `source.json`.
    """

    recipe: Recipe
    ready: Recipe
    source: dict[str, Any]


def settle_run(recipe: Recipe) -> Settled:
    """Choose the data and the models that a run starts from.

    Raises:
        UserError: The source, a dataset version or a registered model does not exist, versions
            can't be mixed, or a model's files are not the registered ones.
    """
    named = name_versions(recipe)
    try:
        ready, source = settle(with_folders(named))
    except PermissionError as error:
        told = f"{error.filename}: cannot be read ({error.strerror}); fix its owner or rights"
        raise UserError(told) from error
    # Of a dataset version, the version says how its data were made.
    data = ready.data if named.data.source.is_published else named.data
    kept = {"model": named.model, "adapter": named.adapter, "data": data}
    return Settled(ready.model_copy(update=kept), ready, source)


def name_versions(recipe: Recipe) -> Recipe:
    """Return the recipe with the number of each registered model's version, in place of its alias.

    Raises:
        UserError: There is no such model, version or alias.
    """
    found = [(s, _named(getattr(recipe, s).init_from, s)) for s in ("model", "adapter")]
    return recipe.model_copy(
        update={
            section: getattr(recipe, section).model_copy(update={"init_from": reference})
            for section, reference in found
            if reference
        }
    )


def _named(reference: str | None, section: str) -> str | None:
    label = registered_label(reference)
    if label is None:
        return None
    try:
        return REGISTERED + registry.named(label).label
    except UserError as error:
        raise UserError(f"{section}.init_from = {reference}: {error}") from error


def with_folders(recipe: Recipe) -> Recipe:
    """Return the recipe with the verified folder of each registered model that it starts from.

    The tokenizer of kind `model` gets the folder of `model.init_from` too.

    Raises:
        UserError: A version's files are gone or are not the registered ones, or have no adapter.
    """
    changed: dict[str, Any] = {}
    if label := registered_label(recipe.model.init_from):
        folder = registry.verified_folder(registry.named(label))
        changed["model"] = recipe.model.model_copy(update={"init_from": str(folder)})
    if label := registered_label(recipe.adapter.init_from):
        adapter = _adapter(label)
        changed["adapter"] = recipe.adapter.model_copy(update={"init_from": str(adapter)})
    return with_own_tokenizer(recipe.model_copy(update=changed))


def with_own_tokenizer(recipe: Recipe) -> Recipe:
    """Return the recipe whose tokenizer of kind `model` has the folder of `model.init_from`."""
    if recipe.data.tokenizer.kind != "model":
        return recipe
    tokenizer = recipe.data.tokenizer.model_copy(update={"path": recipe.model.init_from})
    data = recipe.data.model_copy(update={"tokenizer": tokenizer})
    return recipe.model_copy(update={"data": data})


def _adapter(label: str) -> Path:
    folder = registry.verified_folder(registry.named(label)) / ADAPTER
    if not folder.is_dir():
        raise UserError(
            f"adapter.init_from = {REGISTERED}{label}: this version was trained without adapters; "
            "start from it with model.init_from"
        )
    return folder
