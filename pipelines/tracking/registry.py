"""The model registry: versions of a Hugging Face folder, and which of them is the champion."""

import difflib
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from pipelines.core.errors import UserError
from pipelines.core.records import ModelRef
from pipelines.core.settings import load_settings
from pipelines.core.storage import fresh_folder
from pipelines.tracking import rest
from pipelines.tracking.client import open_client

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHAMPION = "champion"
MODEL_HASH_TAG = "penstock.model_hash"
DOWNLOADS = "models"  # under the home: what was fetched from a store that is no folder

_REFUSED_BY_MLFLOW = re.compile(r"""[/:.%"']""")  # in a logged model's name

# MLflow's page of a model shows it; the loader is transformers itself, so no code of MLflow's runs.
_FLAVORS = {
    "huggingface": {
        "format": "safetensors",
        "loader": "transformers.AutoModelForCausalLM.from_pretrained",
    }
}


@dataclass(frozen=True)
class ModelVersion:
    """One version in the registry."""

    name: str
    version: int
    aliases: tuple[str, ...]
    run_id: str | None
    source: str  # URI of the Hugging Face folder
    tags: dict[str, str]
    description: str
    created: int  # milliseconds since 1970

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
    """A name in the registry."""

    name: str
    latest: int | None
    champion: int | None


def champion(name: str) -> ModelVersion | None:
    """The version that the alias `champion` names; None where there is no model or no alias."""
    return next((each for each in _versions(name) if CHAMPION in each.aliases), None)


def register(
    folders: Sequence[Path],
    name: str,
    run_id: str | None,
    tags: Mapping[str, str],
    description: str,
) -> ModelVersion:
    """Register a model; `promote` makes it the champion.

    Files go straight to the artifact store and the version is made last, so whoever loads it finds
    a whole model. A second call for the same run and content returns the version that is there,
    with these tags and this description. Calls for one name may not run at once.

    Args:
        folders: The Hugging Face folder, and folders whose files lie beside it (card, lineage).
        name: In the registry; made where missing.
        run_id: The MLflow run that made the model.
        tags: Of the version; `penstock.model_hash` is a must.
        description: Of the version, in Markdown.
    """
    client = open_client()
    version = _same_content(client, name, run_id, tags[MODEL_HASH_TAG])
    if version is None:
        model_id = _upload(client, folders, name, run_id, tags)
        _make_registered_model(client, name)
        client.create_model_version(
            name,
            source=f"models:/{model_id}",
            model_id=model_id,  # a server takes the source only with it
            run_id=run_id,
            tags=dict(tags),
            description=description,
        )
        version = _same_content(client, name, run_id, tags[MODEL_HASH_TAG])
    else:
        for key, value in tags.items():
            client.set_model_version_tag(name, str(version), key, value)
        client.update_model_version(name, str(version), description)
    return find(name, str(version))


def promote(version: ModelVersion) -> ModelVersion:
    """Move the alias `champion` to a version; it names one version at any moment."""
    open_client().set_registered_model_alias(version.name, CHAMPION, str(version.version))
    return find(version.name, str(version.version))


def list_models() -> list[RegisteredModel]:
    """Every registered model, by name."""
    client = open_client()
    return [
        RegisteredModel(
            name=model.name,
            latest=max((int(each.version) for each in model.latest_versions), default=None),
            champion=int(model.aliases[CHAMPION]) if CHAMPION in model.aliases else None,
        )
        for model in client.search_registered_models(order_by=["name ASC"])
    ]


def show(name: str) -> list[ModelVersion]:
    """The versions of a model, newest first.

    Raises:
        UserError: no such model.
    """
    versions = _versions(name)
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


def download(name: str, alias_or_version: str = CHAMPION) -> Path:
    """The Hugging Face folder of a version: where it is kept, or a copy of a remote store's.

    Raises:
        UserError: no such version, or its files are gone.
    """
    version = find(name, alias_or_version)
    uri = open_client().get_model_version_download_uri(name, str(version.version))
    place = urlparse(uri)
    if place.scheme in ("", "file"):
        folder = Path(unquote(place.path))
    else:
        folder = load_settings().home / DOWNLOADS / name / str(version.version)
        if not folder.is_dir():
            _fetch(uri, folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} version {version.version}: its files are gone from {uri}")
    return folder


def _fetch(uri: str, folder: Path) -> None:
    from mlflow.artifacts import download_artifacts

    with fresh_folder(folder) as temporary:
        download_artifacts(artifact_uri=uri, dst_path=str(temporary))


def _versions(name: str) -> list[ModelVersion]:
    """Newest first; none where there is no such model."""
    model = rest.registered_model(name)
    if model is None:
        return []
    aliases = {each["alias"]: int(each["version"]) for each in model.get("aliases", [])}
    versions = [_version(each, aliases) for each in rest.model_versions(name)]
    return sorted(versions, key=lambda each: each.version, reverse=True)


def _version(found: Mapping[str, Any], aliases: Mapping[str, int]) -> ModelVersion:
    number = int(found["version"])
    return ModelVersion(
        name=found["name"],
        version=number,
        aliases=tuple(sorted(alias for alias, each in aliases.items() if each == number)),
        run_id=found.get("run_id") or None,
        source=found["source"],
        tags={each["key"]: each["value"] for each in found.get("tags", [])},
        description=found.get("description", ""),
        created=int(found["creation_timestamp"]),
    )


def _same_content(
    client: "MlflowClient", name: str, run_id: str | None, model_hash: str
) -> int | None:
    """The version that a run made of this content; None before there is one.

    A server that dies between making a version and saying so is asked again by its client, and
    makes a second: the oldest stays.
    """
    wanted = (run_id, model_hash)
    found = [each.version for each in _versions(name) if (each.run_id, each.model_hash) == wanted]
    for doubled in found[:-1]:  # newest first
        client.delete_model_version(name, str(doubled))
    return found[-1] if found else None


def _upload(
    client: "MlflowClient",
    folders: Sequence[Path],
    name: str,
    run_id: str | None,
    tags: Mapping[str, str],
) -> str:
    """Put the files into the artifact store as a logged model; its id."""
    from mlflow.models import Model

    experiment = client.get_run(run_id).info.experiment_id if run_id else rest.experiment_id(name)
    logged = client.create_logged_model(
        experiment,
        name=_REFUSED_BY_MLFLOW.sub("-", name),
        source_run_id=run_id,
        tags=dict(tags),
        model_type="causal-lm",
    )
    try:
        for folder in folders:
            client.log_model_artifacts(logged.model_id, str(folder))
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "MLmodel"
            Model(run_id=run_id, model_id=logged.model_id, flavors=_FLAVORS).save(str(path))
            client.log_model_artifact(logged.model_id, str(path))
    except BaseException:
        client.finalize_logged_model(logged.model_id, "FAILED")
        raise
    client.finalize_logged_model(logged.model_id, "READY")
    return str(logged.model_id)


def _make_registered_model(client: "MlflowClient", name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
