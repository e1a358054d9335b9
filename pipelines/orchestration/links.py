"""Links from a task's page to its Ray job, its MLflow run and its Data Docs.

Airflow stores a link only at a task's end; `show` stores it at once for the running task's page.
"""

from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import Context


class _StageLink(BaseOperatorLink):
    """A link whose address the operator keeps in its `links`."""

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 (Airflow's signature)
        """Return the address that `show` kept; an empty address hides the link."""
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
        """Return the URL of a job's page on a cluster's dashboard."""
        return f"{ray}/#/jobs/{submission_id}"


class RayJobLogLink(_StageLink):
    """The job's whole output as text; Ray's own page asks for the token first."""

    name = "Ray job log"

    @staticmethod
    def address(ray: str, submission_id: str) -> str:
        """Return the URL of the driver's log, which grows while the job runs."""
        query = f"submission_id={submission_id}&lines=-1&download_filename={submission_id}.log"
        return f"{ray}/api/v0/logs/file?{query}"


class MlflowRunLink(_StageLink):
    """The run's page in MLflow."""

    name = "MLflow run"


class DataDocsLink(_StageLink):
    """The data gate's findings, as MLflow shows them."""

    name = "Data Docs"
