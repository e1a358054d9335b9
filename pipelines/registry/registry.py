"""The model registry as it is read: names, versions, and the files of a version, verified.

`registration` adds versions, `promotion` says which one is champion, `audit` remembers it.
"""

import difflib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.core.storage import fresh_folder
from pipelines.recipe.recipe import MODEL_NAME
from pipelines.registry import audit
from pipelines.registry.integrity import check_folder
from pipelines.registry.signing import verify
from pipelines.run.records import ModelRef
from pipelines.tracking import rest
from pipelines.tracking.tracked_run import MODEL_HASH_TAG, local_folder

CHAMPION = "champion"  # what is served
CHALLENGER = "challenger"  # awaits a user's answer
PREVIOUS = "previous"  # what a rollback returns to
DOWNLOADS = "models"  # under the home: what was fetched from a store that is no folder
LINEAGE = "lineage.json"  # beside the weights
MLMODEL = "MLmodel"  # MLflow's file beside the weights; it names the logged model


@dataclass(frozen=True)
class ModelVersion:
    """One version in the registry."""

    name: str
    version: int
    aliases: tuple[str, ...]
    run_id: str | None
    source: str  # `models:/<id>` of a logged model; of another tool's version any URI
    tags: dict[str, str]
    description: str
    created: int  # milliseconds since 1970

    @property
    def label(self) -> str:
        """`name@N`."""
        return f"{self.name}@{self.version}"

    @property
    def model_hash(self) -> str:
        """The content hash of the model that was registered."""
        return self.tags.get(MODEL_HASH_TAG, "")

    @property
    def ref(self) -> ModelRef:
        """What records keep of it."""
        return ModelRef(name=self.name, version=self.version, aliases=self.aliases)


@dataclass(frozen=True)
class RegisteredModel:
    """A name in the registry, and the versions that its aliases name."""

    name: str
    latest: int | None
    champion: int | None
    challenger: int | None
    previous: int | None


def champion(name: str) -> ModelVersion | None:
    """The version that the alias `champion` names; None where there is no model or no alias."""
    return next((each for each in versions_of(name) if CHAMPION in each.aliases), None)


def list_models() -> list[RegisteredModel]:
    """Every registered model, by name."""
    models = []
    for model in rest.registered_models():
        aliases = aliases_of(model)
        newest = (int(each["version"]) for each in model.get("latest_versions", []))
        named = (aliases.get(alias) for alias in (CHAMPION, CHALLENGER, PREVIOUS))
        models.append(RegisteredModel(model["name"], max(newest, default=None), *named))
    return models


def show(name: str) -> list[ModelVersion]:
    """The versions of a model, newest first.

    Raises:
        UserError: no such model.
    """
    versions = versions_of(name)
    if not versions:
        known = [model.name for model in list_models()]
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else "`penstock models list` shows them"
        raise UserError(f"no model is registered as {name!r}; {hint}")
    return versions


def find(name: str, alias_or_version: str = CHAMPION) -> ModelVersion:
    """One version, by number or alias.

    Raises:
        UserError: no such model, version or alias.
    """
    versions = show(name)
    for each in versions:
        if alias_or_version in (str(each.version), *each.aliases):
            return each
    known = [text for each in versions for text in (str(each.version), *each.aliases)]
    raise UserError(f"{name} has no version or alias {alias_or_version!r}; it has {known}")


def named(model: str) -> ModelVersion:
    """The version that a user names: `name@N`, `name@alias`, or `name` for the champion.

    Raises:
        UserError: no such model, version or alias.
    """
    name, _, which = model.partition("@")
    return find(name, which or CHAMPION)


def audit_trail(name: str) -> audit.Trail:
    """Who made which version champion, when and why; an empty trail of another tool's model."""
    return audit.read_trail(tags_of(rest.registered_model(name) or {}))


def download(name: str, alias_or_version: str = CHAMPION) -> Path:
    """The Hugging Face folder of a version, verified: where it is kept, or a remote store's copy.

    Raises:
        UserError: no such version, its files are gone, or are not those that were registered.
    """
    return verified_folder(find(name, alias_or_version))


def verified_folder(version: ModelVersion) -> Path:
    """As `download`, for a version that was found."""
    address = rest.artifact_address(version.name, version.version)
    folder = local_folder(address)
    if folder is None:
        # A version's number comes again where a model was deleted and made anew; its files do not.
        key = hashlib.sha256(address.encode()).hexdigest()[:8]
        kept = load_settings().home / DOWNLOADS / version.name
        folder = kept / f"{version.version}-{key}"
        if not folder.is_dir():
            _fetch(address, folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{version.label}: its files are gone from {address}")
    check_folder(folder, version.label)
    verify(folder, version.label)
    _check_owner(version, folder)
    return folder


def logged_model_id(folder: Path) -> str | None:
    """MLflow's id of the model whose files lie in a folder; None where it names none."""
    path = folder / MLMODEL
    facts = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found: str | None = facts.get("model_id")
    return found


def versions_of(name: str) -> list[ModelVersion]:
    """Newest first; none where there is no such model.

    Raises:
        UserError: that is no model's name.
    """
    if not re.fullmatch(MODEL_NAME, name):
        raise UserError(f"{name!r} is no model's name: it has letters, digits, `_`, `-`, `.`, ` `")
    model = rest.registered_model(name)
    if model is None:
        return []
    aliases = aliases_of(model)
    versions = [_version(each, aliases) for each in rest.model_versions(name)]
    return sorted(versions, key=lambda each: each.version, reverse=True)


def aliases_of(model: Mapping[str, Any]) -> dict[str, int]:
    """Version by alias, of a registered model as the server has it."""
    return {each["alias"]: int(each["version"]) for each in model.get("aliases", [])}


def tags_of(found: Mapping[str, Any]) -> dict[str, str]:
    """The tags of a registered model or version as the server has it."""
    return {each["key"]: each.get("value", "") for each in found.get("tags", [])}


def _version(found: Mapping[str, Any], aliases: Mapping[str, int]) -> ModelVersion:
    number = int(found["version"])
    return ModelVersion(
        name=found["name"],
        version=number,
        aliases=tuple(sorted(alias for alias, each in aliases.items() if each == number)),
        run_id=found.get("run_id") or None,
        source=found.get("source", ""),
        tags=tags_of(found),
        description=found.get("description", ""),
        created=int(found["creation_timestamp"]),
    )


def _fetch(address: str, folder: Path) -> None:
    from pipelines.tracking.mlflow_client import open_client

    open_client()  # sets MLflow's own settings
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    with fresh_folder(folder) as temporary:
        # Not `mlflow.artifacts.download_artifacts`, which puts them into a folder `artifacts`.
        get_artifact_repository(address).download_artifacts("", str(temporary))


def _check_owner(version: ModelVersion, folder: Path) -> None:
    """Raise where these are another version's files: signed, too, but put in this one's place."""
    owner = logged_model_id(folder)
    if version.source != f"models:/{owner}":
        raise UserError(
            f"{version.label} is not what was signed: {folder} holds the logged model {owner}, "
            f"the registry names {version.source}"
        )
