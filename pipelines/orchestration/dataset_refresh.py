"""The operators of `data_refresh`, and the asset through which it starts `llm_pipeline`."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset, BaseOperator
from airflow.sdk.exceptions import AirflowSkipException

from pipelines.core.errors import UserError
from pipelines.core.settings import PROJECT, load_settings
from pipelines.data.reading.sources import describe
from pipelines.datasets import versions
from pipelines.datasets.dataset_publishing import dataset_name, make
from pipelines.datasets.run_source import settle, unchanged
from pipelines.orchestration.naming import workspace_name
from pipelines.orchestration.trigger_form import PREPARED, asked_recipe, mistakes_fail_the_task
from pipelines.run.workspace import Run
from pipelines.stage_cache.open_workspace import open_workspace
from pipelines.training.recipe_check import check_recipe

if TYPE_CHECKING:
    from airflow.sdk import Context

    from pipelines.recipe.recipe import Recipe

_log = logging.getLogger(__name__)
DATASET_VERSION = Asset("dataset_version")  # an event's `extra` says which: {"dataset": "name@N"}


class LookOperator(BaseOperator):
    """Looks at the source: opens a workspace where there is something new, else skips the run."""

    def execute(self, context: "Context") -> str:
        """Return the workspace's path."""
        run_id = workspace_name(self.dag_id, context["dag_run"].run_id)
        with mistakes_fail_the_task(self.task_id, run_id):
            recipe = asked_recipe(context)
            check_recipe(recipe)
            return str(self._open(run_id, recipe))

    def _open(self, run_id: str, recipe: "Recipe") -> Path:
        if recipe.data.source.is_published:
            raise UserError(
                f"data.source: {recipe.data.source.published_label} is published already; "
                "data_refresh makes them of text: stdlib, files or huggingface"
            )
        recipe, source = settle(recipe)
        newest = versions.newest(dataset_name(recipe))
        if newest and unchanged(newest, recipe, source, PROJECT / "dvc.yaml"):
            raise AirflowSkipException(
                f"{newest.label} was made of {describe(recipe.data.source)} as it is now"
            )
        previous = newest.stats if newest else None
        return open_workspace(PROJECT, load_settings().home, run_id, recipe, source, previous)


class PublishOperator(BaseOperator):
    """Makes a version of what passed the data gate, and announces it."""

    template_fields = ("workspace",)

    def __init__(self, *, workspace: str = PREPARED, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.workspace = workspace

    def execute(self, context: "Context") -> dict[str, str]:
        """Push the files, commit, tag; the event goes out when this task has succeeded."""
        run_id = Run.read(Path(self.workspace)).dag_run_id
        with mistakes_fail_the_task(self.task_id, run_id):
            version = make(Path(self.workspace))
        # One that this run made in an earlier try was perhaps never announced.
        if version.run["dag_run_id"] != run_id:
            raise AirflowSkipException(f"the data are, byte for byte, those of {version.label}")
        documents, tokens = version.documents, version.tokens
        self.log.info("%s: %d documents, %d tokens", version.label, documents, tokens)
        context["outlet_events"][DATASET_VERSION].extra = {"dataset": version.label}
        return {"dataset": version.label}


def triggering_version(context: "Context") -> str | None:
    """The `name@N` whose publication started this run; of several the newest.

    None for a run that a user or the clock started. Events gather while as many runs as may be
    are active; a version of another dataset among them is named in the task's log.

    Raises:
        UserError: an event, sent by hand, names no version.
    """
    events = context["triggering_asset_events"].get(DATASET_VERSION, ())
    labels = [_label(event.extra) for event in sorted(events, key=lambda event: event.timestamp)]
    if not labels:
        return None
    newest = {label.partition("@")[0]: label for label in labels}
    for left_out in sorted({*newest.values()} - {labels[-1]}):
        _log.warning(
            "%s was published too, but a run trains on one version, here %s; start one for it: "
            "penstock run --set data.source.kind=dataset --set data.source.path=%s",
            left_out,
            labels[-1],
            left_out,
        )
    return labels[-1]


def _label(extra: "dict[str, Any]") -> str:
    label = extra.get("dataset")
    if not isinstance(label, str):
        raise UserError(
            f"an event of the asset {DATASET_VERSION.name} names no version; "
            'give it {"dataset": "name@N"}'
        )
    return label
