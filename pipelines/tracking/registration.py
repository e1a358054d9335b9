"""Adding a version to the model registry: a Hugging Face folder, checked, signed and uploaded."""

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.core.settings import load_settings
from pipelines.tracking import audit, registry, rest
from pipelines.tracking.client import open_client
from pipelines.tracking.integrity import check_folder
from pipelines.tracking.registry import MLMODEL, ModelVersion
from pipelines.tracking.run import MODEL_HASH_TAG
from pipelines.tracking.signing import SIGNATURE, sign

if TYPE_CHECKING:
    from mlflow import MlflowClient

_REFUSED_BY_MLFLOW = str.maketrans(dict.fromkeys("/:.%\"'", "-"))  # in a logged model's name

# MLflow's page of a model shows the first; by the second `mlflow models serve` finds its loader.
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

    Files go straight to the artifact store and the version is made last, so whoever loads it finds
    a whole model. A second call for the same run and content returns the version that is there,
    with these tags and this description. Calls for one name may not run at once.

    Args:
        folders: The Hugging Face folder, and folders whose files lie beside it (card, lineage).
        name: In the registry; made where missing.
        run_id: The MLflow run that made the model.
        tags: Of the version; `penstock.model_hash` is a must.
        description: Of the version, in Markdown.

    Raises:
        UserError: the folders hold what no model may, or there is no key to sign with.
    """
    client = open_client()
    version = _same_content(client, name, run_id, tags[MODEL_HASH_TAG])
    if version is None:
        model_id = _upload(client, folders, name, run_id, tags)
        _make_registered_model(name)
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
    return registry.find(name, str(version))


def _same_content(
    client: "MlflowClient", name: str, run_id: str | None, model_hash: str
) -> int | None:
    """The version that a run made of this content; None before there is one.

    A server that dies between making a version and saying so is asked again by its client, and
    makes a second: the oldest stays.
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
    """Put the files into the artifact store as a logged model; its id."""
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
        except BaseException:
            client.finalize_logged_model(model_id, "FAILED")
            raise
    client.finalize_logged_model(model_id, "READY")
    return model_id


@contextmanager
def _assembled(folders: Sequence[Path]) -> Iterator[Path]:
    """All of them as one folder, for one signature; nothing is copied on one disk."""
    home = load_settings().home
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix=".register.") as scratch:
        whole = Path(scratch) / "model"
        for folder in folders:
            shutil.copytree(folder, whole, symlinks=True, dirs_exist_ok=True, copy_function=_link)
        yield whole


def _link(source: str, target: str) -> None:
    # What is there may be a link to a file of another folder: to write it would change that.
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another disk, or one without links
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
    path.unlink(missing_ok=True)  # a link, likewise
    facts = {"run_id": run_id, "model_id": model_id, "flavors": _FLAVORS}
    Model(**facts, signature=signature).save(str(path))


def _make_registered_model(name: str) -> None:
    """The name comes with its audit trail, so that there is never a second one."""
    if rest.registered_model(name) is None:
        rest.create_registered_model(name, {audit.RUN_TAG: audit.create_run(name)})
