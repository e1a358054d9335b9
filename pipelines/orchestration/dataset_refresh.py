"""The operators of `data_refresh`, and the assets whose events start training on a new version."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset, AssetAlias, BaseOperator
from airflow.sdk.exceptions import AirflowSkipException

from pipelines.core.errors import UserError
from pipelines.core.product import PRODUCT_FILES
from pipelines.core.settings import PROJECT, load_settings
from pipelines.data.reading.sources import describe
from pipelines.datasets import versions
from pipelines.datasets.dataset_publishing import dataset_name, make
from pipelines.datasets.run_source import unchanged
from pipelines.orchestration.naming import workspace_name
from pipelines.orchestration.task_lineage import lineage
from pipelines.orchestration.trigger_form import PREPARED, asked_recipe, mistakes_fail_the_task
from pipelines.recipe.recipe_files import load_own_recipe, project_recipes
from pipelines.registry.parents import settle_run
from pipelines.run.records import PreprocessRecord
from pipelines.run.workspace import Run
from pipelines.stage_cache.open_workspace import open_workspace
from pipelines.tracking.lineage_events import published, stage_outputs

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context

    from pipelines.recipe.recipe import Recipe

_log = logging.getLogger(__name__)
DATASET_VERSION = Asset("dataset_version")  # its event's `extra`: {"dataset": "name@N"}
# Stands for the asset of one dataset, whose name is known only when a version is published.
PUBLISHED = AssetAlias("published_dataset")
_OF_A_DATASET = "dataset/"


def dataset_asset(name: str) -> Asset:
    """Return the asset that gets an event at each new version of the dataset."""
    return Asset(f"{_OF_A_DATASET}{name}")


class LookOperator(BaseOperator):
    """Checks the source; opens a workspace if it is new or changed, else skips the run."""

    def execute(self, context: "Context") -> str:
        """Return the workspace's path."""
        run_id = workspace_name(self.dag_id, context["dag_run"].run_id)
        with mistakes_fail_the_task(self.task_id, run_id):
            return str(self._open(run_id, asked_recipe(context)))

    def _open(self, run_id: str, recipe: "Recipe") -> Path:
        if recipe.data.source.is_published:
            raise UserError(
                f"data.source: {recipe.data.source.published_label} is published already; "
                "data_refresh makes versions from text: stdlib, files or huggingface"
            )
        # Do not import these when the DAG file is parsed.
        from pipelines.stages.beforehand import PUBLISHING, check_beforehand

        run = settle_run(recipe)
        check_beforehand(run, PUBLISHING)
        recipe, source = run.recipe, run.source
        newest = versions.newest(dataset_name(recipe))
        if newest and unchanged(newest, recipe, source, PRODUCT_FILES / "dvc.yaml"):
            raise AirflowSkipException(
                f"{newest.label} was made from {describe(recipe.data.source)} as it is now"
            )
        previous = newest.stats if newest else None
        return open_workspace(
            PROJECT, load_settings().home, run_id, recipe, source, previous, ready=run.ready
        )


class PublishOperator(BaseOperator):
    """Makes a version of the data that passed the data gate, and announces it."""

    template_fields = ("workspace",)

    def __init__(self, *, workspace: str = PREPARED, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.workspace = workspace
        self._label = ""  # of the version that this task made

    def execute(self, context: "Context") -> dict[str, str]:
        """Push the files, commit and tag; Airflow sends the event when this task has succeeded."""
        run_id = Run.read(Path(self.workspace)).dag_run_id
        with mistakes_fail_the_task(self.task_id, run_id):
            version = make(Path(self.workspace))
        # A version that this run made in an earlier try may not have been announced.
        if version.run["dag_run_id"] != run_id:
            raise AirflowSkipException(f"the data equal those of {version.label}, byte for byte")
        documents, tokens = version.documents, version.tokens
        self.log.info("%s: %d documents, %d tokens", version.label, documents, tokens)
        extra: dict[str, Any] = {"dataset": version.label}
        if version.name in awaited_datasets():
            context["outlet_events"][PUBLISHED].add(dataset_asset(version.name), extra=extra)
        else:
            context["outlet_events"][PUBLISHED].add(DATASET_VERSION, extra=extra)
        self._label = version.label
        return {"dataset": version.label}

    def get_openlineage_facets_on_complete(self, ti: Any) -> "OperatorLineage[Any, Any]":  # noqa: ARG002
        """Tell OpenLineage's provider of the version, which is made of what *preprocess* made.

        It asks here after a failure, too, when there is no version.
        """
        read = stage_outputs(Path(self.workspace), PreprocessRecord.stage)
        return lineage(read, [published(self._label)] if self._label else [])


def awaited_datasets() -> set[str]:
    """Return the datasets for which a recipe of the project waits."""
    found = set()
    for path in project_recipes():
        try:
            found.add(load_own_recipe(path).schedule.dataset)
        except UserError as error:
            _log.warning("%s", error)
    return {name for name in found if name}


def triggering_version(context: "Context") -> str | None:
    """Return the `name@N` whose publication started this run; if there are several, the newest.

    It is None for a run that a user or the schedule started. Events gather while the most allowed
    runs are active; the task's log names any version of another dataset among them.

    Raises:
        UserError: An event that a user sent names no version.
    """
    events = [
        event
        for asset, of_asset in context["triggering_asset_events"].items()
        if asset.name == DATASET_VERSION.name or asset.name.startswith(_OF_A_DATASET)
        for event in of_asset
    ]
    labels = [_label(event.extra) for event in sorted(events, key=lambda event: event.timestamp)]
    if not labels:
        return None
    newest = {label.partition("@")[0]: label for label in labels}
    for left_out in sorted({*newest.values()} - {labels[-1]}):
        _log.warning(
            "%s was published too, but a run trains on one version, here %s; start a run for it: "
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
            "an asset's event that started this run names no dataset version; "
            'give it the extra {"dataset": "name@N"}'
        )
    return label
