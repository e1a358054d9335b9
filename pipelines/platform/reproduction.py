"""`penstock models reproduce`: train a registered model again and compare it with the first.

The signed lineage gives its commit with the uncommitted changes, its recipe and its data. The
stages up to *train* run again without the stage cache, with as many processes in the same layout;
the platform's Ray and Airflow are not used.
"""

import json
import math
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.errors import EXIT_USER_ERROR, UserError
from pipelines.core.product import PRODUCT, product_state
from pipelines.core.settings import PROJECT, load_settings
from pipelines.core.storage import md5, read_json
from pipelines.recipe.recipe_files import parse_recipe
from pipelines.registry.parents import Settled, settle_run
from pipelines.registry.registry import LINEAGE, ModelVersion, verified_folder
from pipelines.run.records import PATCH_FILE, EvaluateRecord, TrainRecord
from pipelines.run.verdict import RightSize
from pipelines.stage_cache.open_workspace import environment, open_workspace
from pipelines.stages.evaluate.right_sizing import served_model
from pipelines.stages.stage_process import forget_error, stage_environment, user_error
from pipelines.tracking.lineage import SOURCE_FILE, sha256

_DEGREES = (
    "dp_replicate",
    "dp_shard",
    "tp",
    "pp",
    "cp",
)  # their product is the number of processes
_DECIDES = (
    "lock",
    "python",
    "machine",
    "device",
)  # besides code and recipe


@dataclass(frozen=True)
class Origin:
    """What a model was made from, read from its lineage."""

    version: ModelVersion
    folder: Path  # the version's verified files
    facts: Mapping[str, Any]
    inputs: Settled

    @property
    def trained(self) -> TrainRecord:
        """The record of the original training."""
        return TrainRecord.model_validate(self.facts["records"][TrainRecord.stage])

    @property
    def right_size(self) -> RightSize | None:
        """The variant of the trained model that was registered, if there was a memory budget."""
        measured = self.facts["records"].get(EvaluateRecord.stage)
        return EvaluateRecord.model_validate(measured).right_size if measured else None

    def differences(self) -> list[str]:
        """Return, as a warning, what may make the weights differ on this machine."""
        then, now = self.facts["environment"] or {}, environment(PROJECT, self.inputs.ready)
        found = [
            f"{key} was {then[key]}, but here it is {now[key]}"
            for key in _DECIDES
            if key in then and then[key] != now[key]
        ]
        product = (self.facts["run"] or {}).get("product")
        if product and PROJECT != PRODUCT and product != product_state():
            found.append(
                f"it was made by Penstock {product['version']} with the code "
                f"{product['code'][:12]}, but here is {product_state()['version']} with "
                f"{product_state()['code'][:12]}"
            )
        for stage, kept in (self.facts.get("kept") or {}).items():
            found.append(
                f"{stage} runs again here, but its result was kept from {kept['run']} although "
                f"{'; '.join(kept['changed'])} ({kept['who']}: {kept['why']})"
            )
        return found


@dataclass(frozen=True)
class Reproduction:
    """The result of a reproduction."""

    workspace: Path
    model_hash: str
    differing: tuple[str, ...]  # files of the model that are not equal byte for byte

    @property
    def equal(self) -> bool:
        """Whether the whole model is the same, weights included."""
        return not self.differing


def find_origin(version: ModelVersion) -> Origin:
    """Read a version's lineage and check that its data still exist.

    Raises:
        UserError: The version has no lineage, or its data changed or are gone.
    """
    folder = verified_folder(version)
    if not (folder / LINEAGE).is_file():
        raise UserError(f"{version.label} has no {LINEAGE}: it was not made by a run of Penstock")
    facts = read_json(folder / LINEAGE)
    if not (facts.get("recipe") and (facts.get("run") or {}).get("git_commit")):
        raise UserError(f"{version.label}: its {LINEAGE} names no commit or no recipe")
    inputs = settle_run(parse_recipe(facts["recipe"], where=version.label))
    return Origin(version, folder, facts, inputs)


def reproduce(origin: Origin) -> Reproduction:
    """Make the workspace and run it, which takes as long as preprocessing and training did.

    Raises:
        UserError: This checkout lacks the commit, the data changed, or a stage refused.
    """
    run = origin.facts["run"]
    patch = (origin.folder / PATCH_FILE).read_bytes() if run["dirty"] else b""
    workspace = open_workspace(
        PROJECT,
        load_settings().home,
        f"reproduce-{origin.version.name}-{origin.version.version}-{secrets.token_hex(3)}",
        origin.inputs.recipe,
        origin.inputs.source,
        state=(run["git_commit"], patch),
        ready=origin.inputs.ready,
    )
    _check_source(origin, workspace)
    python = [sys.executable, "-m"]
    for stage in ("preprocess", "validate"):
        _run(workspace, stage, [*python, "pipelines.stages", stage], {})
    _run(workspace, TrainRecord.stage, [*python, *_training(origin)], _threads(origin))
    if origin.right_size:
        stage = EvaluateRecord.stage
        _run(workspace, stage, [*python, "pipelines.stages", stage], _threads(origin))
    made, model_hash = served_model(workspace)
    return Reproduction(workspace, model_hash, _differing(origin.folder, made))


def _check_source(origin: Origin, workspace: Path) -> None:
    then, now = origin.facts["sha256"][SOURCE_FILE], sha256(workspace / SOURCE_FILE)
    if then != now:
        raise UserError(
            f"{origin.version.label}: its data have changed ({SOURCE_FILE} had sha256 "
            f"{then}, now {now}); restore them, or train on dataset versions, which do not change"
        )


def _training(origin: Origin) -> list[str]:
    """Return the engine's command for the layout that training had, no matter who chose it.

    If the time limit had stopped training, the command stops at the same step.
    """
    trained = origin.trained
    processes = math.prod(int(trained.layout[f"parallel.{each}"]) for each in _DEGREES)
    pinned = trained.layout | {"train.max_seconds": None}
    sets = [f"--set={key}={json.dumps(value)}" for key, value in pinned.items()]
    engine = ["pipelines.training", "--recipe=params.yaml", "--workspace=.", *sets]
    if trained.steps < origin.inputs.recipe.train.steps:
        engine.append(f"--last-step={trained.steps}")
    if processes == 1:
        return engine
    return ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", *engine]


def _threads(origin: Origin) -> dict[str, str]:
    """Set the original number of threads, because on a CPU the threads divide sums."""
    threads = ((origin.facts.get("trained_on") or {}).get("cpu") or {}).get("threads")
    return {"OMP_NUM_THREADS": str(threads)} if threads else {}


def _run(workspace: Path, stage: str, command: list[str], variables: Mapping[str, str]) -> None:
    """Run a stage with the workspace's code; print its whole output to stderr."""
    forget_error(workspace)
    code = subprocess.run(
        command,
        cwd=workspace,
        env={**stage_environment(workspace), **variables},
        stdout=sys.__stderr__,
        check=False,
    ).returncode
    if code:
        why = user_error(workspace, stage) or f"it ended with exit code {code}; see above"
        raise (UserError if code == EXIT_USER_ERROR else RuntimeError)(f"{stage}: {why}")


def _differing(first: Path, second: Path) -> tuple[str, ...]:
    """Return the files of the second folder that the first lacks or has with other bytes."""
    return tuple(
        sorted(
            name
            for path in second.rglob("*")
            if path.is_file()
            and not (
                (first / (name := path.relative_to(second).as_posix())).is_file()
                and md5(first / name) == md5(path)
            )
        )
    )
