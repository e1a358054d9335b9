"""Add a version to the model registry: a Hugging Face folder is checked, signed and uploaded.

A model's bill of materials in CycloneDX lists its data, its parent and the packages of the
environment that made it.

The same model gives the same bytes, because `serialNumber` and `metadata.timestamp`, which are
optional in CycloneDX, are not written.
"""

import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core.settings import load_settings
from pipelines.core.storage import sync_folder
from pipelines.registry import audit, registry
from pipelines.registry.integrity import check_folder
from pipelines.registry.registry import MLMODEL, ModelVersion
from pipelines.registry.signing import SIGNATURE, sign
from pipelines.tracking import rest
from pipelines.tracking.mlflow_client import open_client
from pipelines.tracking.tracked_run import MODEL_HASH_TAG

if TYPE_CHECKING:
    from cyclonedx.model.component import Component
    from mlflow import MlflowClient

SBOM = "sbom.cdx.json"
_PINNED = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)", re.MULTILINE)


def bill_of_materials(
    name: str, model_hash: str, lock: Path, made_of: Mapping[str, str], git_commit: str | None
) -> dict[str, Any]:
    """Return the bill of materials as JSON (CycloneDX 1.6).

    Args:
        name: The registered model's name.
        model_hash: The hash of its content.
        lock: The pinned packages, one `name==version` per line.
        made_of: The names of data and parent models, with the hash of their content.
        git_commit: The project's commit.
    """
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6

    model = Component(
        name=name,
        version=model_hash,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref="model",
    )
    data = [
        Component(name=each, version=content, type=ComponentType.DATA, bom_ref=f"data:{each}")
        for each, content in made_of.items()
    ]
    penstock = Component(name="penstock", version=git_commit or "unknown", bom_ref="penstock")
    bom = Bom(components=[*data, penstock, *_packages(lock)], metadata=BomMetaData(component=model))
    bom.register_dependency(model, [*data, penstock])
    value: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    del value["serialNumber"], value["metadata"]["timestamp"]
    return value


def _packages(lock: Path) -> Iterator["Component"]:
    from cyclonedx.model.component import Component
    from packageurl import PackageURL

    for found in _PINNED.finditer(lock.read_text(encoding="utf-8")):
        purl = PackageURL("pypi", name=found["name"].lower(), version=found["version"])
        yield Component(
            name=found["name"], version=found["version"], purl=purl, bom_ref=purl.to_string()
        )


_REFUSED_BY_MLFLOW = str.maketrans(
    dict.fromkeys("/:.%\"'", "-")
)  # characters in a logged model's name

# MLflow's model page shows the first; `mlflow models serve` finds its loader in the second.
_FLAVORS = {
    "huggingface": {
        "format": "safetensors",
        "loader": "transformers.AutoModelForCausalLM.from_pretrained",
    },
    "python_function": {
        "loader_module": "pipelines.evaluation.mlflow_model",
        "python_version": platform.python_version(),
    },
}


def register(
    folders: Sequence[Path],
    name: str,
    run_id: str | None,
    tags: Mapping[str, str],
    description: str,
) -> ModelVersion:
    """Register a model; `promotion.promote` makes it the champion.

    Files go directly to the artifact store and the version is created last, so a reader always
    finds a whole model. A second call for the same run and content returns the existing version,
    with these tags and this description. Calls for one name must not run at once.

    Args:
        folders: The Hugging Face folder, and folders of files to add (card, lineage).
        name: The name in the registry, created if it is missing.
        run_id: The MLflow run that made the model.
        tags: The version's tags; `penstock.model_hash` is required.
        description: The version's description in Markdown.

    Raises:
        UserError: The folders hold files that no model may, or there is no signing key.
    """
    client = open_client()
    version = _same_content(client, name, run_id, tags[MODEL_HASH_TAG])
    if version is None:
        model_id = _upload(client, folders, name, run_id, tags)
        _make_registered_model(name)
        client.create_model_version(
            name,
            source=f"models:/{model_id}",
            model_id=model_id,  # a server accepts the source only with it
            run_id=run_id,
            tags=dict(tags),
            description=description,
        )
        version = _same_content(client, name, run_id, tags[MODEL_HASH_TAG])
    else:
        for key, value in tags.items():
            client.set_model_version_tag(name, str(version), key, value)
        client.update_model_version(name, str(version), description)
    return registry.find(name, str(version))


def _same_content(
    client: "MlflowClient", name: str, run_id: str | None, model_hash: str
) -> int | None:
    """Return the version that a run made from this content; None before there is one.

    If a server dies after creating a version and before answering, its client asks again, which
    creates a second: only the oldest is kept.
    """
    wanted = (run_id, model_hash)
    versions = registry.versions_of(name)
    found = [each.version for each in versions if (each.run_id, each.model_hash) == wanted]
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
    """Put the files into the artifact store as a logged model and return its id."""
    with _assembled(folders) as folder:
        check_folder(folder, name)
        experiment = (
            client.get_run(run_id).info.experiment_id if run_id else rest.experiment_id(name)
        )
        logged = client.create_logged_model(
            experiment,
            name=name.translate(_REFUSED_BY_MLFLOW),
            source_run_id=run_id,
            tags=dict(tags),
            model_type="causal-lm",
        )
        model_id = str(logged.model_id)
        try:
            (folder / SIGNATURE).unlink(missing_ok=True)
            _write_mlmodel(folder / MLMODEL, run_id, model_id)
            sign(folder)
            client.log_model_artifacts(model_id, str(folder))
            _sync(str(logged.artifact_location))
        except BaseException:
            client.finalize_logged_model(model_id, "FAILED")
            raise
    client.finalize_logged_model(model_id, "READY")
    return model_id


def _sync(store: str) -> None:
    """Wait until a power cut would take nothing of an artifact store that is a folder."""
    from mlflow.utils.file_utils import local_file_uri_to_path
    from mlflow.utils.uri import is_local_uri

    if is_local_uri(store):
        sync_folder(Path(local_file_uri_to_path(store)))


@contextmanager
def _assembled(folders: Sequence[Path]) -> Iterator[Path]:
    """Yield all folders as one, for one signature; files are linked where the disk allows it."""
    home = load_settings().home
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix=".register.") as scratch:
        whole = Path(scratch) / "model"
        for folder in folders:
            shutil.copytree(folder, whole, symlinks=True, dirs_exist_ok=True, copy_function=_link)
        yield whole


def _link(source: str, target: str) -> None:
    # The target may be a link to a file of another folder, which writing would change.
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another disk, or a disk without links
        shutil.copy2(source, target, follow_symlinks=False)


def _write_mlmodel(path: Path, run_id: str | None, model_id: str) -> None:
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    signature = ModelSignature(
        inputs=Schema([ColSpec("string", "prompt")]),
        outputs=Schema([ColSpec("string")]),
        params=ParamSchema(
            [
                ParamSpec("max_tokens", "integer", 64),
                ParamSpec("temperature", "double", 0.0),
                ParamSpec("seed", "integer", 0),
            ]
        ),
    )
    path.unlink(missing_ok=True)  # it may be a link too
    facts = {"run_id": run_id, "model_id": model_id, "flavors": _FLAVORS}
    Model(**facts, signature=signature).save(str(path))


def _make_registered_model(name: str) -> None:
    """Create the name with its audit trail, so that there is never a second trail."""
    if rest.registered_model(name) is None:
        rest.create_registered_model(name, {audit.RUN_TAG: audit.create_run(name)})
