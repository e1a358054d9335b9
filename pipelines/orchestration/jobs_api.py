"""Ray's Jobs REST API, spoken directly: importing ray takes seconds and would block a triggerer.

An https address is trusted by the CAs of SSL_CERT_FILE, where that is set.

A workspace's code as a Ray package, for a cluster whose nodes run it from their own disks.
"""

import asyncio
import hashlib
import io
import time
import zipfile
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import BaseModel, ConfigDict

from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings

LIVE = ("PENDING", "RUNNING")
ADDRESS_FILE = "ray-address"  # of a workspace whose run has a Ray cluster of its own
_END_S = 60.0  # Ray kills what a stop has not ended after 3 seconds
_AGENT_S = 240.0  # as long as a raylet may take to start, see `platform/environment.py`
_NO_AGENT = "No available agent to submit job"
_TIMEOUT = httpx.Timeout(30.0)  # seconds; a submit waits for the job's supervisor to start


class Job(BaseModel):
    """What Ray says of a job."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    submission_id: str | None = None  # of a driver that nobody submitted
    status: str  # PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED
    message: str | None = None
    error_type: str | None = None  # of FAILED: whether the command failed or what should run it
    driver_exit_code: int | None = None  # of the command, as a shell has it or, of a signal, minus
    metadata: dict[str, str] | None = None

    @property
    def live(self) -> bool:
        """Whether it may still use resources."""
        return self.status in LIVE


class JobsApi:
    """An asynchronous client; use it as a context manager.

    Args:
        url: the dashboard's address, `http://host:port` or https.
        token_path: a file with the bearer token, read for each request, as tokens are renewed; a
            cluster that asks for none needs no file.
    """

    def __init__(self, url: str, token_path: Path) -> None:
        self._url = url
        self._token_path = token_path

    async def __aenter__(self) -> Self:
        """Open the connection."""
        self._client = httpx.AsyncClient(
            base_url=self._url, timeout=_TIMEOUT, auth=TokenFile(self._token_path)
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

    async def jobs(self) -> list[Job]:
        """All that the cluster knows, those that are over included."""
        response = await self._client.get("/api/jobs/")
        _raise_for_status(response)
        return [Job.model_validate(job) for job in response.json()]

    async def logs(self, submission_id: str) -> str:
        """All that a job printed so far."""
        response = await self._client.get(f"/api/jobs/{submission_id}/logs")
        _raise_for_status(response)
        return str(response.json()["logs"])

    async def submit(
        self,
        submission_id: str,
        entrypoint: str,
        runtime_env: dict[str, Any],
        metadata: dict[str, str],
    ) -> None:
        """Submit a job; one that exists by this id already is as good.

        Ray refuses a known id atomically, so two callers can't make two jobs. A head that has just
        started, or is busy, has no agent for a while: it is asked again, which costs no retry.
        """
        job = {
            "submission_id": submission_id,
            "entrypoint": entrypoint,
            "runtime_env": runtime_env,
            "metadata": metadata,
        }
        deadline = time.monotonic() + _AGENT_S
        response = await self._client.post("/api/jobs/", json=job)
        while _NO_AGENT in response.text and time.monotonic() < deadline:
            await asyncio.sleep(1)
            response = await self._client.post("/api/jobs/", json=job)
        if response.is_error and f"{submission_id} already exists" in response.text:
            return
        _raise_for_status(response)

    async def stop(self, submission_id: str) -> None:
        """Ask for a job's end; a job that is unknown or over is no error."""
        response = await self._client.post(f"/api/jobs/{submission_id}/stop")
        if response.status_code != httpx.codes.NOT_FOUND:
            _raise_for_status(response)

    async def end(self, submission_id: str) -> None:
        """Stop a job and wait until it uses nothing any more.

        Raises:
            TimeoutError: it lives on.
        """
        async with asyncio.timeout(_END_S):
            while (job := await self.get(submission_id)) and job.live:
                await self.stop(submission_id)
                await asyncio.sleep(0.5)

    async def upload(self, name: str, content: bytes) -> str:
        """Keep a package in the cluster unless it is there, and return its URI."""
        path = f"/api/packages/gcs/{name}"
        response = await self._client.get(path)  # where it is there, this also keeps it for a while
        if response.status_code == httpx.codes.NOT_FOUND:
            response = await self._client.put(path, content=content)
        _raise_for_status(response)
        return f"gcs://{name}"


def ray_address(workspace: Path | None) -> str:
    """Where a run's jobs go: to its own cluster while it has one, else to the platform's."""
    if workspace is not None:
        with suppress(FileNotFoundError):  # it may go at any time
            return (workspace / ADDRESS_FILE).read_text(encoding="utf-8").strip()
    return load_settings().ray_url


def jobs_api(workspace: Path | None = None) -> JobsApi:
    """The Jobs API of a run's cluster; without a workspace, of the platform's."""
    return JobsApi(ray_address(workspace), load_settings().ray_token_path)


async def stop_job(submission_id: str, workspace: Path) -> None:
    """Ask the run's cluster to end a job."""
    async with jobs_api(workspace) as jobs:
        await jobs.stop(submission_id)


class TokenFile(httpx.Auth):
    """A bearer token that lies in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the header."""
        if self._path.is_file():
            token = self._path.read_text(encoding="utf-8").strip()
            request.headers["Authorization"] = f"Bearer {token}"
        yield request


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


CODE = ("pipelines", "ray_jobs")  # what our Ray jobs import of a workspace
_EPOCH = (1980, 1, 1, 0, 0, 0)  # zip knows no earlier time; the same content is the same package


async def upload_code(jobs: JobsApi, workspace: Path, names: Iterable[str]) -> str:
    """Upload files and folders of the workspace and return the package's URI.

    The package is named by its content: one that the cluster has is not sent again.

    Raises:
        UserError: a name is neither a file nor a folder there.
    """
    package = pack(workspace, names)
    digest = hashlib.sha256(package).hexdigest()[:32]
    return await jobs.upload(f"_ray_pkg_{digest}.zip", package)


def pack(workspace: Path, names: Iterable[str]) -> bytes:
    """A zip of the files, without bytecode and hidden ones; equal content gives equal bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as package:
        for path in sorted(_files(workspace, names)):
            info = zipfile.ZipInfo(path.relative_to(workspace).as_posix(), _EPOCH)
            info.external_attr = 0o644 << 16
            package.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


def _files(workspace: Path, names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        place = workspace / name
        if place.is_file():
            yield place
        elif place.is_dir():
            files = (path for path in place.rglob("*") if path.is_file())
            yield from (path for path in files if _is_code(path.relative_to(workspace)))
        else:
            raise UserError(f"{place}: no such file or folder to ship to Ray")


def _is_code(path: Path) -> bool:
    return not any(part == "__pycache__" or part.startswith(".") for part in path.parts)
