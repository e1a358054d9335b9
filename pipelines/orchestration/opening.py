"""What the first task of each DAG does alike: which recipe is asked for, and how a mistake ends."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from pipelines.core.errors import UnreachableError, UserError
from pipelines.core.recipe_files import with_absolute_paths
from pipelines.core.settings import PROJECT, load_settings
from pipelines.ledger.workspace import workspace_path
from pipelines.orchestration.trigger_form import recipe_from
from pipelines.stages.runner import keep_error

if TYPE_CHECKING:
    from airflow.sdk import Context

    from pipelines.core.recipe import Recipe

# A template and no XComArg: the graph shows a chain, not an edge from `prepare` to every stage.
PREPARED = "{{ ti.xcom_pull(task_ids='prepare') }}"


def asked_recipe(context: "Context") -> "Recipe":
    """The recipe of the trigger form or of `conf`; raises UserError with one line."""
    conf: Mapping[str, Any] = context["dag_run"].conf or {}
    return with_absolute_paths(recipe_from(context["params"], conf), PROJECT)


@contextmanager
def mistakes_fail_the_task(task_id: str, run_id: str) -> Iterator[None]:
    """A person's error fails the task at once, as a retry would not mend it; an outage may pass.

    Its line is kept in the run's workspace, where the stages keep theirs.
    """
    try:
        yield
    except UserError as error:
        keep_error(workspace_path(load_settings().runs, run_id), task_id, error)
        if isinstance(error, UnreachableError):
            raise
        raise AirflowFailException(str(error)) from None
