"""Ray's Jobs REST API, spoken directly: importing ray takes seconds and would block a triggerer."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import BaseModel, ConfigDict

LIVE = ("PENDING", "RUNNING")
_TIMEOUT = httpx.Timeout(30.0)  # seconds; a submit waits for the job's supervisor to start


class Job(BaseModel):
    """What Ray says of a job."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    submission_id: str
    status: str  # PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED
    message: str | None = None

    @property
    def live(self) -> bool:
        """Whether it may still use resources."""
        return self.status in LIVE


class JobsApi:
    """An asynchronous client; use it as a context manager.

    Args:
        url: the dashboard's address, `http://host:port`.
        token_path: a file that holds the bearer token; read at each start, never passed on.
    """

    def __init__(self, url: str, token_path: Path) -> None:
        self._url = url
        self._token_path = token_path

    async def __aenter__(self) -> Self:
        """Open the connection."""
        token = self._token_path.read_text(encoding="utf-8").strip()
        self._client = httpx.AsyncClient(
            base_url=self._url, timeout=_TIMEOUT, headers={"Authorization": f"Bearer {token}"}
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the connection."""
        await self._client.aclose()

    async def get(self, submission_id: str) -> Job | None:
        """The job, or None where Ray knows none by that id."""
        response = await self._client.get(f"/api/jobs/{submission_id}")
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        _raise_for_status(response)
        return Job.model_validate(response.json())

    async def submit(
        self,
        submission_id: str,
        entrypoint: str,
        env_vars: dict[str, str],
        metadata: dict[str, Any],
    ) -> None:
        """Submit a job; one that exists by this id already is as good.

        Ray refuses a known id atomically, so two callers can't make two jobs.
        """
        response = await self._client.post(
            "/api/jobs/",
            json={
                "submission_id": submission_id,
                "entrypoint": entrypoint,
                "runtime_env": {"env_vars": env_vars},
                "metadata": metadata,
            },
        )
        if response.is_error and f"{submission_id} already exists" in response.text:
            return
        _raise_for_status(response)

    async def stop(self, submission_id: str) -> None:
        """Ask for a job's end; a job that is unknown or over is no error."""
        response = await self._client.post(f"/api/jobs/{submission_id}/stop")
        if response.status_code != httpx.codes.NOT_FOUND:
            _raise_for_status(response)


def _raise_for_status(response: httpx.Response) -> None:
    """Ray says in the body what is wrong; httpx's own error would drop it."""
    if response.is_error:
        reason = response.text.strip().rpartition("\n")[2]
        raise httpx.HTTPStatusError(
            f"Ray answered {response.status_code} to {response.request.method} "
            f"{response.request.url}: {reason}",
            request=response.request,
            response=response,
        )
