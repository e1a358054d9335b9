"""What makes a checkpoint one of this run."""

import hashlib
import json
from pathlib import Path

from pipelines.core.recipe import Recipe
from pipelines.core.records import DatasetRef
from pipelines.models.folder import fingerprint

# What neither changes the samples of a step nor what is computed of them, but for the order of
# sums; with other values of these a run goes on. A key that is not named here begins anew.
_MAY_CHANGE = (
    "name",
    "description",
    "validation",
    "parallel",
    "evaluate",
    "register",
    "resources",
    "data.reader",
    "train.max_seconds",
    "train.micro_batch_size",
    "train.activation_checkpoint",
    "train.compile",
    "train.checkpoints",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.keep_best",
    "train.log_every",
    "train.max_rollbacks",
    "train.stall_seconds",
    "train.profile_steps",
)


def identity(recipe: Recipe, dataset: DatasetRef) -> str:
    """A hash of what a run's weights follow from: with the same one it can be resumed.

    The layout is not in it, nor are the number of processes or how the work is cut. The weights
    that the run starts from are: a checkpoint of adapters is of no use on another base.
    """
    values = recipe.to_dict()
    for name in _MAY_CHANGE:
        section, _, key = name.rpartition(".")
        del (values[section] if section else values)[key]
    starts = (recipe.model.init_from, recipe.adapter.init_from)
    weights = [folder and fingerprint(Path(folder)) for folder in starts]
    text = json.dumps([values, dataset.model_dump(mode="json"), weights], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
