"""What Airflow needs to know of Penstock as a provider package: its operators and their connection.

Airflow reads it while it is itself imported, so this module imports nothing of Airflow.
"""

from typing import Any

_INTEGRATION = "Ray Jobs"
_HERE = "pipelines.orchestration"


def get_provider_info() -> dict[str, Any]:
    """Return the metadata that Airflow reads through the entry point `apache_airflow_provider`."""
    return {
        "package-name": "penstock",
        "name": "Penstock",
        "description": "Ray jobs that survive what happens to Airflow, and language models.",
        "integrations": [
            {
                "integration-name": _INTEGRATION,
                "external-doc-url": "https://docs.ray.io/en/latest/cluster/running-applications/job-submission/",
                "tags": ["machine-learning", "llm"],
            }
        ],
        "operators": _modules("ray_job"),
        "hooks": _modules("ray_jobs_hook"),
        "triggers": _modules("ray_job_trigger"),
        "connection-types": [
            {
                "connection-type": "ray_jobs",
                "hook-class-name": f"{_HERE}.ray_jobs_hook.RayJobsHook",
                "hook-name": _INTEGRATION,
                "ui-field-behaviour": {
                    "hidden-fields": ["schema", "login", "extra"],
                    "relabeling": {"host": "Dashboard's address", "password": "Token"},
                    "placeholders": {"host": "https://ray.example.org", "port": "8265"},
                },
            }
        ],
        "extra-links": [f"{_HERE}.links.RayJobLink", f"{_HERE}.links.RayJobLogLink"],
    }


def _modules(name: str) -> list[dict[str, Any]]:
    return [{"integration-name": _INTEGRATION, "python-modules": [f"{_HERE}.{name}"]}]
