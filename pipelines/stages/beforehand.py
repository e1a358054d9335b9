"""Refuses, when a run is prepared, what one of its stages would refuse hours later.

Each check is the stage's own code, called early. All that is wrong is told at once.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipelines.core.errors import UserError
from pipelines.core.formatting import size
from pipelines.core.settings import PROJECT, load_settings
from pipelines.data.cleaning.filter_rules import check_scripts
from pipelines.data.cleaning.filters import ExtensionFilter
from pipelines.data.cleaning.pii_finders import check_region
from pipelines.data.reading.instruction import ASSISTANT, USER
from pipelines.data.tokens.chat_template import (
    CHATML,
    CHATML_MARKERS,
    ChatTemplate,
    find_template,
    template_variables,
)
from pipelines.data.tokens.tokenizer import END_OF_TEXT, load_pretrained
from pipelines.models.model_folder import load_config
from pipelines.recipe.bias_templates import load_bias_templates
from pipelines.recipe.recipe import Recipe
from pipelines.registry.signing import check_key
from pipelines.stage_cache.open_workspace import project_state
from pipelines.stage_cache.used_extensions import load_extensions
from pipelines.stages.run_plan import shape_beforehand
from pipelines.training.checkpoint.store import CheckpointStore, place_of_run
from pipelines.training.recipe_check import check_recipe

_CHECKPOINT_BYTES = 12  # a parameter and AdamW's two moments, in fp32
_MODEL_BYTES = 4  # at most, for the parameters of the exported model
_BYTES_VOCABULARY = 257


class Check(NamedTuple):
    """A check of a recipe.

    Attributes:
        stage: The stage in which the mistake showed before.
        run: Raises a UserError; its argument has the folders of registered models.
    """

    stage: str
    run: Callable[[Recipe], None]


def check_beforehand(recipe: Recipe) -> None:
    """Check all that can be known before a run begins.

    Args:
        recipe: The recipe, with the folders of the registered models that it starts from.

    Raises:
        UserError: One line with each mistake and what to do.
    """
    wrong: list[str] = []
    for check in CHECKS:
        try:
            check.run(recipe)
        except UserError as error:
            if str(error) not in wrong:
                wrong.append(str(error))
    if wrong:
        raise UserError("; and ".join(wrong))


def check_tokenizer(recipe: Recipe) -> None:
    """Load a tokenizer that is given."""
    if _is_tokenized_here(recipe) and recipe.data.tokenizer.is_given:
        load_pretrained(str(recipe.data.tokenizer.path))


def check_template(recipe: Recipe) -> None:
    """Render a small conversation by the chat template."""
    instruction = recipe.data.instruction
    if not (_is_tokenized_here(recipe) and instruction.is_chat):
        return
    folder = _tokenizer_folder(recipe)
    names = ("bos_token", "eos_token", "pad_token")
    variables = template_variables(folder) if folder else dict.fromkeys(names, END_OF_TEXT)
    template = find_template(instruction, folder)
    ChatTemplate(template, variables, re.compile(r"(?!)")).render(((USER, "a"), (ASSISTANT, "b")))


def check_cleaning(recipe: Recipe) -> None:
    """Check the names that only the cleaning's own libraries know."""
    if _is_tokenized_here(recipe):
        check_region(recipe.data.pii.phone_region)
        check_scripts(recipe.data.filters.character_set.scripts)


def check_extensions(recipe: Recipe) -> None:
    """Load the extensions that the recipe names, and make its filters."""
    load_extensions(recipe)
    for each in recipe.data.filters.extensions:
        ExtensionFilter(each)


def check_vocabulary(recipe: Recipe) -> None:
    """Compare the tokenizer with the vocabulary of the model that training starts from."""
    base = recipe.model.init_from
    if base is None or not _is_tokenized_here(recipe):
        return
    wanted, known = _vocabulary(recipe), load_config(Path(base)).vocab_size
    if wanted > known:
        raise UserError(
            f"data.tokenizer gives {wanted} token ids, but the vocabulary of model.init_from = "
            f"{base} is {known}; set data.tokenizer.kind = model, the model's own tokenizer, which "
            "writes a chat template's marks in the tokens that it has"
        )


def check_adapter(recipe: Recipe) -> None:
    """Add the adapters to a model without weights."""
    if recipe.adapter.kind == "none" or recipe.model.init_from is None:
        return
    import torch

    from pipelines.models.peft_format import adapt
    from pipelines.models.transformer import Transformer

    with torch.device("meta"):
        adapt(Transformer(load_config(Path(recipe.model.init_from))), recipe)


def check_reader(recipe: Recipe) -> None:
    """Refuse to stream data that no remote has."""
    if recipe.data.reader == "object_store" and _is_tokenized_here(recipe):
        raise UserError(
            "data.reader = 'object_store' streams a dataset version from its remote, but "
            f"data.source.kind = {recipe.data.source.kind!r} makes the data in this run; set "
            "data.reader to auto, or data.source to a version of `penstock data list`"
        )


def check_checkpoints(recipe: Recipe) -> None:
    """Write to the place of the checkpoints."""
    if recipe.train.checkpoints is not None:
        CheckpointStore(place_of_run(recipe.train.checkpoints, Path("penstock-probe"))).probe()


def check_disk(recipe: Recipe) -> None:
    """Compare the free space with what the checkpoints and the model take."""
    shape, train = shape_beforehand(recipe), recipe.train
    kept = train.keep_checkpoints + 1 + train.keep_best  # one is written before one is deleted
    whole = kept if train.checkpoints is None and recipe.adapter.kind == "none" else 0
    needed = shape.parameters * (whole * _CHECKPOINT_BYTES + _MODEL_BYTES)
    home = load_settings().home
    home.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home).free
    if needed > free:
        raise UserError(
            f"{home} has {size(free)} free, but {whole} checkpoints and the model take "
            f"{size(needed)}; free some, set train.checkpoints to another place, or lower "
            "train.keep_checkpoints"
        )


def check_bias_templates(recipe: Recipe) -> None:
    """Read the bias templates of a user."""
    bias = recipe.evaluate.bias
    if bias.enabled and bias.templates is not None:
        load_bias_templates(bias.templates)


def check_tasks(recipe: Recipe) -> None:
    """Read the task files of the evaluation harness, as far as they are plain YAML."""
    for path in map(Path, recipe.evaluate.harness.files):
        try:
            task = yaml.load(path.read_text(encoding="utf-8"), _TaskLoader)  # noqa: S506 (a safe one)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"evaluate.harness.files: {path}: {_line(error)}") from error
        if not (isinstance(task, dict) and isinstance(task.get("task"), str)):
            raise UserError(
                f"evaluate.harness.files: {path}: the file has no `task:` key with a name"
            )


def check_signing_key(recipe: Recipe) -> None:  # noqa: ARG001 (each run signs its model)
    """Load the key that signs the model."""
    check_key()


def check_clean(recipe: Recipe) -> None:
    """Refuse uncommitted changes where the gate would."""
    if recipe.registration.require_clean and project_state(PROJECT)[1]:
        raise UserError(
            f"register.require_clean: {PROJECT} has uncommitted changes, so that the model could "
            "not be registered; commit them"
        )


CHECKS = (
    Check("train", check_recipe),
    Check("preprocess", check_tokenizer),
    Check("preprocess", check_template),
    Check("preprocess", check_cleaning),
    Check("preprocess", check_extensions),
    Check("train", check_vocabulary),
    Check("train", check_adapter),
    Check("train", check_reader),
    Check("train", check_checkpoints),
    Check("train", check_disk),
    Check("evaluate", check_bias_templates),
    Check("evaluate", check_tasks),
    Check("register", check_signing_key),
    Check("register", check_clean),
)


class _TaskLoader(yaml.SafeLoader):
    """Takes the harness's own tags, such as `!function`, for nothing."""


_TaskLoader.add_multi_constructor("!", lambda *_: None)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _is_tokenized_here(recipe: Recipe) -> bool:
    return not recipe.data.source.is_published


def _tokenizer_folder(recipe: Recipe) -> Path | None:
    if not recipe.data.tokenizer.is_given:
        return None
    given = Path(str(recipe.data.tokenizer.path)).expanduser()
    return given if given.is_dir() else given.parent


def _vocabulary(recipe: Recipe) -> int:
    """Return how many token ids the data will have; too few where the corpus decides."""
    tokenizer = recipe.data.tokenizer
    if not tokenizer.is_given:
        known: dict[str, Any] = {"bpe": tokenizer.vocab_size, "byte": _BYTES_VOCABULARY}
        return int(known.get(tokenizer.kind, 0)) + len(_new_marks(recipe, None))
    loaded = load_pretrained(str(tokenizer.path))
    ids = loaded.get_vocab(with_added_tokens=True)
    return max(ids.values()) + 1 + len(_new_marks(recipe, loaded))


def _new_marks(recipe: Recipe, loaded: Any) -> list[str]:
    """Return ChatML's marks that a tokenizer gets added."""
    if not recipe.data.instruction.is_chat or recipe.data.tokenizer.kind == "model":
        return []
    if find_template(recipe.data.instruction, _tokenizer_folder(recipe)) != CHATML:
        return []
    return [m for m in CHATML_MARKERS if loaded is None or loaded.token_to_id(m) is None]
