"""A Ray cluster as a connection of Airflow, of the type `ray_jobs`.

Its host is the dashboard's address, its password the cluster's token.
"""

from typing import Any

from airflow.sdk import BaseHook


class RayJobsHook(BaseHook):
    """The address of a Ray cluster and the token for it, from a connection."""

    conn_name_attr = "ray_conn_id"
    default_conn_name = "ray_default"
    conn_type = "ray_jobs"
    hook_name = "Ray Jobs"

    def __init__(self, ray_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ray_conn_id = ray_conn_id

    def place(self) -> tuple[str, str | None]:
        """Return the address of the Jobs API, and the token if the cluster requires one."""
        found = self.get_connection(self.ray_conn_id)
        host = str(found.host or "127.0.0.1").rstrip("/")
        address = host if "://" in host else f"http://{host}"
        return (f"{address}:{found.port}" if found.port else address), found.password

    def test_connection(self) -> tuple[bool, str]:
        """Ask the cluster for its version."""
        import httpx

        address, token = self.place()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            answer = httpx.get(f"{address}/api/version", headers=headers, timeout=10)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            return False, f"{address}: {error}"
        return True, f"{address}: Ray {answer.json()['ray_version']}"
