"""What OpenLineage's provider for Airflow asks the tasks of Penstock.

The provider sends the events of each DAG run and task, with run ids and parents of its own, where a
transport is set; without one it registers no listener. It asks a task what it reads when the task
begins, and what it made when it ends.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.stages.stage import find_stage
from pipelines.tracking import lineage_events

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context


def is_sent() -> bool:
    """Return whether Airflow's provider sends events."""
    from airflow.providers.openlineage import conf

    return not conf.is_disabled()


def parent_variables(context: "Context") -> dict[str, str]:
    """Return the variables by which a task's child process names the task as its parent."""
    if not is_sent():
        return {}
    from airflow.providers.openlineage.plugins import macros

    ti = context["ti"]
    return {
        lineage_events.PARENT: macros.lineage_parent_id(ti),
        lineage_events.ROOT: macros.lineage_root_parent_id(ti),
    }


def lineage(inputs: list[Any], outputs: list[Any]) -> "OperatorLineage[Any, Any]":
    """Return the provider's own description of what a task read and made."""
    from airflow.providers.openlineage.extractors import OperatorLineage

    return OperatorLineage(inputs=inputs, outputs=outputs)


class StageLineage:
    """The answers of a stage's task; a stage that fails has made nothing."""

    stage: str
    workspace: str

    def get_openlineage_facets_on_start(self) -> "OperatorLineage[Any, Any]":
        """Return what the stage reads."""
        return lineage(self._inputs(), [])

    def get_openlineage_facets_on_complete(self, ti: Any) -> "OperatorLineage[Any, Any]":  # noqa: ARG002
        """Return what the stage read and made."""
        made = lineage_events.stage_outputs(Path(self.workspace), self.stage)
        return lineage(self._inputs(), made)

    def get_openlineage_facets_on_failure(self, ti: Any) -> "OperatorLineage[Any, Any]":  # noqa: ARG002
        """Return what the stage read."""
        return lineage(self._inputs(), [])

    def _inputs(self) -> list[Any]:
        earlier = find_stage(self.stage).inputs
        return lineage_events.stage_inputs(Path(self.workspace), self.stage, earlier)
