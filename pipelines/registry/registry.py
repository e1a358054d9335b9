"""Reading the model registry: names, versions, and the verified files of a version.

`registration` adds versions, `promotion` chooses the champion, and `audit` records it.
"""

import difflib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.checked_yaml import read_yaml
from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.core.storage import fresh_folder
from pipelines.recipe.section import MODEL_NAME
from pipelines.registry import audit
from pipelines.registry.integrity import check_folder
from pipelines.registry.signing import verify
from pipelines.run.records import ModelRef
from pipelines.tracking import rest
from pipelines.tracking.tracked_run import MODEL_HASH_TAG, local_folder

CHAMPION = "champion"  # the version that is served
CHALLENGER = "challenger"  # waits for a user's answer
PREVIOUS = "previous"  # the version that a rollback returns to
DOWNLOADS = "models"  # in the home: files fetched from a remote store
PARENT_TAG = "penstock.parent"  # of a version: the `name@N` that its training started from
LINEAGE = "lineage.json"  # beside the weights
MLMODEL = "MLmodel"  # MLflow's file beside the weights; it names the logged model


@dataclass(frozen=True)
class ModelVersion:
    """One version in the registry."""

    name: str
    version: int
    aliases: tuple[str, ...]
    run_id: str | None
    source: str  # `models:/<id>` of a logged model; another tool's may be any URI
    tags: dict[str, str]
    description: str
    created: int  # milliseconds since 1970

    @property
    def label(self) -> str:
        """The version's label, `name@N`."""
        return f"{self.name}@{self.version}"

    @property
    def model_hash(self) -> str:
        """The content hash of the model that was registered."""
        return self.tags.get(MODEL_HASH_TAG, "")

    @property
    def parent(self) -> str | None:
        """The label of the registered version that its training started from, if any."""
        return self.tags.get(PARENT_TAG)

    @property
    def ref(self) -> ModelRef:
        """The reference to this version in records."""
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
    """Return the version with the alias `champion`; None if there is no model or alias."""
    return next((each for each in versions_of(name) if CHAMPION in each.aliases), None)


def list_models() -> list[RegisteredModel]:
    """Return every registered model, by name."""
    models = []
    for model in rest.registered_models():
        aliases = aliases_of(model)
        newest = (int(each["version"]) for each in model.get("latest_versions", []))
        named = (aliases.get(alias) for alias in (CHAMPION, CHALLENGER, PREVIOUS))
        models.append(RegisteredModel(model["name"], max(newest, default=None), *named))
    return models


def show(name: str) -> list[ModelVersion]:
    """Return the versions of a model, newest first.

    Raises:
        UserError: There is no such model.
    """
    versions = versions_of(name)
    if not versions:
        known = [model.name for model in list_models()]
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else "`penstock models list` shows them"
        raise UserError(f"no model is registered as {name!r}; {hint}")
    return versions


def find(name: str, alias_or_version: str = CHAMPION) -> ModelVersion:
    """Return one version, by number or alias.

    Raises:
        UserError: There is no such model, version or alias.
    """
    versions = show(name)
    for each in versions:
        if alias_or_version in (str(each.version), *each.aliases):
            return each
    known = [text for each in versions for text in (str(each.version), *each.aliases)]
    raise UserError(f"{name} has no version or alias {alias_or_version!r}; it has {known}")


def named(model: str) -> ModelVersion:
    """Return the version that a user names: `name@N`, `name@alias`, or `name` for the champion.

    Raises:
        UserError: There is no such model, version or alias.
    """
    name, _, which = model.partition("@")
    return find(name, which or CHAMPION)


def descent(version: ModelVersion) -> list[str]:
    """Return the labels of a version and of those that it came from, the oldest first.

    The line ends at a version that was deleted, which it still names.
    """
    line = [version.label]
    while (parent := version.parent) and parent not in line:
        line.append(parent)
        name, _, number = parent.partition("@")
        found = next((v for v in versions_of(name) if str(v.version) == number), None)
        if found is None:
            break
        version = found
    return line[::-1]


def audit_trail(name: str) -> audit.Trail:
    """Return the audit trail of a model; it is empty for another tool's model."""
    return audit.read_trail(tags_of(rest.registered_model(name) or {}))


def download(name: str, alias_or_version: str = CHAMPION) -> Path:
    """Return a version's verified Hugging Face folder: its own, or a copy from a remote store.

    Raises:
        UserError: There is no such version, or its files are gone or are not the registered ones.
    """
    return verified_folder(find(name, alias_or_version))


def verified_folder(version: ModelVersion) -> Path:
    """Return the verified folder as `download` does, for a version that was found."""
    address = rest.artifact_address(version.name, version.version)
    folder = local_folder(address)
    if folder is None:
        # A deleted and recreated model has the same version numbers again, but other files.
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
    """Return MLflow's id of the model in a folder, or None if the folder names none."""
    path = folder / MLMODEL
    facts = read_yaml(path) if path.is_file() else {}
    found: str | None = facts.get("model_id")
    return found


def versions_of(name: str) -> list[ModelVersion]:
    """Return the versions of a model, newest first; empty if there is no such model.

    Raises:
        UserError: The name is not a valid model name.
    """
    if not re.fullmatch(MODEL_NAME, name):
        raise UserError(f"{name!r} is not a model's name: use letters, digits, `_`, `-`, `.`, ` `")
    model = rest.registered_model(name)
    if model is None:
        return []
    aliases = aliases_of(model)
    versions = [_version(each, aliases) for each in rest.model_versions(name)]
    return sorted(versions, key=lambda each: each.version, reverse=True)


def aliases_of(model: Mapping[str, Any]) -> dict[str, int]:
    """Return the version of each alias of a registered model from the server."""
    return {each["alias"]: int(each["version"]) for each in model.get("aliases", [])}


def tags_of(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a registered model or version from the server."""
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
        # `mlflow.artifacts.download_artifacts` would put them into a folder `artifacts`.
        get_artifact_repository(address).download_artifacts("", str(temporary))


def _check_owner(version: ModelVersion, folder: Path) -> None:
    """Raise UserError if the folder holds another version's files, which are signed too."""
    owner = logged_model_id(folder)
    if version.source != f"models:/{owner}":
        raise UserError(
            f"{version.label} is not what was signed: {folder} holds the logged model {owner}, "
            f"the registry names {version.source}"
        )
