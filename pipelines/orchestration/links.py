"""Links from a task's page to its Ray job, its MLflow run and its Data Docs.

Airflow stores a link at a task's end only; `show` stores it at once, so that a running task has it.
"""

from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import Context


class _StageLink(BaseOperatorLink):
    """A link whose address the operator keeps in its `links`."""

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 (Airflow's signature)
        """The address that `show` kept; empty hides the link."""
        address: str = operator.links.get(self.xcom_key, "")
        return address

    def show(self, operator: Any, context: "Context", address: str) -> None:
        """Keep the address and store it for the page of the running task."""
        operator.links[self.xcom_key] = address
        context["ti"].xcom_push(key=self.xcom_key, value=address)


class RayJobLink(_StageLink):
    """The job's page on Ray's dashboard."""

    name = "Ray job"

    @staticmethod
    def address(ray: str, submission_id: str) -> str:
        """The page of a job of a cluster."""
        return f"{ray}/#/jobs/{submission_id}"


class RayJobLogLink(_StageLink):
    """All that the job printed, as text; Ray's own page asks for the token first."""

    name = "Ray job log"

    @staticmethod
    def address(ray: str, submission_id: str) -> str:
        """The driver's log; it grows while the job lives."""
        query = f"submission_id={submission_id}&lines=-1&download_filename={submission_id}.log"
        return f"{ray}/api/v0/logs/file?{query}"


class MlflowRunLink(_StageLink):
    """The run's page in MLflow."""

    name = "MLflow run"


class DataDocsLink(_StageLink):
    """What the data gate found, as MLflow shows it."""

    name = "Data Docs"
