"""Refuses, when a run is prepared, what one of its stages would refuse hours later.

Each check is the stage's own code, called early. All that is wrong is told at once.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import yaml

from pipelines.core.errors import UnreachableError, UserError, one_line
from pipelines.core.settings import PROJECT
from pipelines.data.cleaning.filter_rules import check_scripts
from pipelines.data.cleaning.filters import ExtensionFilter
from pipelines.data.cleaning.pii_finders import check_region
from pipelines.datasets.datasets_probe import check_publishing
from pipelines.models.model_folder import load_config
from pipelines.planning.precision_rule import Device, settle_precision
from pipelines.recipe.bias_templates import load_bias_templates
from pipelines.recipe.section import registered_label
from pipelines.registry.parents import Settled
from pipelines.registry.signing import check_key
from pipelines.stage_cache.open_workspace import project_state
from pipelines.stage_cache.used_extensions import load_extensions
from pipelines.stages.places_beforehand import (
    check_checkpoints,
    check_dataset_files,
    check_disk,
    check_home,
    check_tracking,
)
from pipelines.stages.tokenizer_beforehand import (
    check_base_tokenizer,
    check_dataset_tokenizer,
    check_template,
    check_tokenizer,
)
from pipelines.training.recipe_check import check_recipe

_PATIENCE_S = 60.0  # with a service or a disk; a healthy one answers within a second


class Check(NamedTuple):
    """A check of what a run starts from.

    Attributes:
        stage: The stage in which the mistake showed before.
        run: Raises a UserError.
        mistake: What it refuses, as docs/projects.md lists it.
        alone: Whether it needs only the recipe and the files that it names.
    """

    stage: str
    run: Callable[[Settled], None]
    mistake: str
    alone: bool = True


def check_beforehand(run: Settled, checks: Sequence[Check]) -> None:
    """Check what can be known before a run begins.

    Raises:
        UserError: One line with each mistake and what to do.
        UnreachableError: Nothing is wrong but that a service does not answer.
    """
    # They ask at the same time, so that all that hang together take no longer than one.
    asked = {check: _ask(check, run) for check in checks if not check.alone}
    end = time.monotonic() + _PATIENCE_S
    found = [
        _answer(check, asked[check], end) if check in asked else _refusal(check, run)
        for check in checks
    ]
    wrong = {str(error): error for error in found if error is not None}
    if wrong:
        passes = all(isinstance(error, UnreachableError) for error in wrong.values())
        raise (UnreachableError if passes else UserError)("; and ".join(wrong))


def _refusal(check: Check, run: Settled) -> UserError | None:
    try:
        check.run(run)
    except UserError as error:
        return error
    except PermissionError as error:
        return UserError(f"{error.filename}: {error.strerror}; fix its owner or rights")
    return None


def _ask(check: Check, run: Settled) -> "Future[UserError | None]":
    future: Future[UserError | None] = Future()

    def ask() -> None:
        try:
            future.set_result(_refusal(check, run))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return future


def _answer(check: Check, asked: "Future[UserError | None]", end: float) -> UserError | None:
    try:
        return asked.result(max(0.0, end - time.monotonic()))
    except TimeoutError:
        return UnreachableError(
            f"no answer in {_PATIENCE_S:g} s, so that this can't be ruled out: {check.mistake}"
        )


def check_engine(run: Settled) -> None:
    """Check that the training engine can run the recipe."""
    check_recipe(run.ready)


def check_cleaning(run: Settled) -> None:
    """Check the names that only the cleaning's own libraries know."""
    data = run.ready.data
    if not data.source.is_published:
        check_region(data.pii.phone_region)
        check_scripts(data.filters.character_set.scripts)


def check_extensions(run: Settled) -> None:
    """Load the extensions that the recipe names, and make its filters."""
    load_extensions(run.ready)
    for each in run.ready.data.filters.extensions:
        ExtensionFilter(each)


def check_adapter(run: Settled) -> None:
    """Add the adapters to a model without weights, and fill them from `adapter.init_from`.

    Each stage of a pipeline must get one.
    """
    # Names and shapes are the same on each device, and the check needs nothing else.
    recipe = settle_precision(run.ready, Device(is_cpu=True, has_bf16=False))
    base, start = recipe.model.init_from, recipe.adapter.init_from
    if recipe.adapter.kind == "none" or base is None:
        return
    if registered_label(base) or registered_label(start):
        return  # a run is checked when it has their folders
    from pipelines.models.initial_model import build_model
    from pipelines.models.peft_format import load_adapter
    from pipelines.parallel.pipeline_parallel import stages_of

    model = build_model(recipe, load_config(Path(base)))
    if start is not None:
        load_adapter(model, Path(start))  # compares the shapes
    pp = recipe.parallel.pp
    if pp != "auto" and pp > 1:
        stages_of(model, pp, recipe.parallel.schedule)


def check_reader(run: Settled) -> None:
    """Refuse to stream data that no remote has."""
    data = run.ready.data
    if data.reader == "object_store" and not data.source.is_published:
        raise UserError(
            "data.reader = 'object_store' streams a dataset version from its remote, but "
            f"data.source.kind = {data.source.kind!r} makes the data in this run; set "
            "data.reader to auto, or data.source to a version of `penstock data list`"
        )


def check_bias_templates(run: Settled) -> None:
    """Read the bias templates of a user."""
    bias = run.ready.evaluate.bias
    if bias.enabled and bias.templates is not None:
        load_bias_templates(bias.templates)


def check_tasks(run: Settled) -> None:
    """Read the task files of the evaluation harness, as far as they are plain YAML."""
    for path in map(Path, run.ready.evaluate.harness.files):
        try:
            task = yaml.load(path.read_text(encoding="utf-8"), _TaskLoader)  # noqa: S506 (a safe one)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"evaluate.harness.files: {path}: {one_line(error)}") from error
        if not (isinstance(task, dict) and isinstance(task.get("task"), str)):
            raise UserError(
                f"evaluate.harness.files: {path}: the file has no `task:` key with a name"
            )


def check_signing_key(run: Settled) -> None:  # noqa: ARG001 (each run signs its model)
    """Load the key that signs the model."""
    check_key()


def check_clean(run: Settled) -> None:
    """Refuse uncommitted changes where the gate would."""
    if run.ready.registration.require_clean and project_state(PROJECT)[1]:
        raise UserError(
            f"register.require_clean: {PROJECT} has uncommitted changes, so that the model could "
            "not be registered; commit them"
        )


def check_pushing(run: Settled) -> None:  # noqa: ARG001 (the settings alone say where to)
    """Check that a dataset version could be pushed."""
    check_publishing()


CHECKS = (
    Check(
        "train",
        check_engine,
        "more workers than the batch has samples; a layout that can't divide the model; a base "
        "with a shorter context",
    ),
    Check("preprocess", check_tokenizer, "a tokenizer that is missing or broken"),
    Check("preprocess", check_template, "a chat template that is missing or broken"),
    Check(
        "preprocess",
        check_cleaning,
        "a country or a script that does not exist, in `data.pii` or `data.filters`",
    ),
    Check(
        "preprocess",
        check_extensions,
        "an extension that is missing, can't be imported, is not what its kind must be, or "
        "refuses its settings",
    ),
    Check(
        "train",
        check_base_tokenizer,
        "a tokenizer that is not the base's own, or has more ids than the base's vocabulary",
    ),
    Check(
        "train",
        check_adapter,
        "a layer for adapters that the base does not have; adapters of another model",
    ),
    Check("train", check_reader, "`data.reader: object_store` for data that no remote has"),
    Check(
        "evaluate",
        check_bias_templates,
        "bias templates that are missing or broken",
    ),
    Check("evaluate", check_tasks, "task files that are missing or broken"),
    Check("preprocess", check_home, "a home that can't be written", alone=False),
    Check(
        "preprocess",
        check_dataset_files,
        "a remote that does not have the dataset version, or does not answer",
        alone=False,
    ),
    Check(
        "train",
        check_dataset_tokenizer,
        "a dataset version with the ids of another tokenizer than the base's",
        alone=False,
    ),
    Check("train", check_checkpoints, "checkpoints that can't be written", alone=False),
    Check(
        "train",
        check_disk,
        "a disk without room for the data, the checkpoints and the model",
        alone=False,
    ),
    Check(
        "register",
        check_tracking,
        "a registry or an artifact store of MLflow that does not answer or can't be written",
        alone=False,
    ),
    Check("register", check_signing_key, "no key to sign with", alone=False),
    Check(
        "register",
        check_clean,
        "`register.require_clean` with uncommitted changes",
        alone=False,
    ),
)
ALONE = tuple(check for check in CHECKS if check.alone)
# Of a run that publishes a dataset version.
PUBLISHING = (
    *CHECKS,
    Check(
        "publish",
        check_pushing,
        "a remote or a repository of datasets that can't be written",
        alone=False,
    ),
)


class _TaskLoader(yaml.SafeLoader):
    """Takes the harness's own tags, such as `!function`, for nothing."""


_TaskLoader.add_multi_constructor("!", lambda *_: None)
