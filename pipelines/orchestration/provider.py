"""What Airflow needs to know of Penstock as a provider package: a type of connection.

Airflow reads it while it is itself imported, so this module imports nothing of Airflow.
"""

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """Return the metadata that Airflow reads through the entry point `apache_airflow_provider`."""
    hook = "pipelines.orchestration.ray_jobs_hook.RayJobsHook"
    return {
        "package-name": "penstock",
        "name": "Penstock",
        "description": "Ray jobs that survive what happens to Airflow, and language models.",
        "connection-types": [{"connection-type": "ray_jobs", "hook-class-name": hook}],
    }
