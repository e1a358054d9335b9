"""Ray's Jobs REST API, without ray: importing it takes seconds and would block a triggerer.

If SSL_CERT_FILE is set, an https address is trusted by the CAs in that file.

The module also packs a workspace's code for clusters whose nodes run it from their own disks.
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
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict

from pipelines.core.checked_json import parse_model
from pipelines.core.errors import DamagedFileError, UserError
from pipelines.core.settings import load_settings

T = TypeVar("T")
LIVE = ("PENDING", "RUNNING")
ADDRESS_FILE = "ray-address"  # in a workspace whose run has its own Ray cluster
TOKEN_FILE = "ray-token"  # noqa: S105 (a name); beside it, where that cluster has a token of its own
_END_S = 60.0  # Ray kills a stopped job that has not ended after 3 seconds
_AGENT_S = 240.0  # as long as a raylet may take to start, see `platform/environment.py`
_NO_AGENT = "No available agent to submit job"
_TIMEOUT = httpx.Timeout(30.0)  # seconds; a submit waits for the job's supervisor to start


class Job(BaseModel):
    """A job as Ray reports it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    submission_id: str | None = None  # None for a driver that was not submitted
    status: str  # PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED
    message: str | None = None
    error_type: str | None = None  # if FAILED: whether the command failed or its runner
    driver_exit_code: int | None = None  # the command's; of a signal, 128 + n or -n
    metadata: dict[str, str] | None = None

    @property
    def live(self) -> bool:
        """Whether the job may still use resources."""
        return self.status in LIVE


class _Logs(BaseModel):
    logs: str


class JobsApi:
    """An asynchronous client; use it as a context manager.

    Args:
        url: The dashboard's address, `http://host:port` or https.
        token_path: A file with the bearer token, read for each request because tokens are renewed;
            a cluster that requires no token needs no file.
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
        """Return the job, or None if Ray knows no job with that id."""
        response = await self._client.get(f"/api/jobs/{submission_id}")
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        _raise_for_status(response)
        return _read(response, Job)

    async def jobs(self) -> list[Job]:
        """Return all jobs that the cluster knows, including those that are over."""
        response = await self._client.get("/api/jobs/")
        _raise_for_status(response)
        return _read(response, list[Job])

    async def logs(self, submission_id: str) -> str:
        """Return everything that a job has printed so far."""
        response = await self._client.get(f"/api/jobs/{submission_id}/logs")
        _raise_for_status(response)
        return _read(response, _Logs).logs

    async def submit(
        self,
        submission_id: str,
        entrypoint: str,
        runtime_env: dict[str, Any],
        metadata: dict[str, str],
    ) -> None:
        """Submit a job, unless a job with this id exists already.

        Ray refuses a known id atomically, so two callers cannot make two jobs. A head node that has
        just started, or is busy, has no agent for a while: asking it again costs no retry.
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
        """Ask Ray to stop a job; an unknown or finished job is not an error."""
        response = await self._client.post(f"/api/jobs/{submission_id}/stop")
        if response.status_code != httpx.codes.NOT_FOUND:
            _raise_for_status(response)

    async def end(self, submission_id: str) -> None:
        """Stop a job and wait until it uses no resources any more.

        Raises:
            TimeoutError: The job does not end.
        """
        async with asyncio.timeout(_END_S):
            while (job := await self.get(submission_id)) and job.live:
                await self.stop(submission_id)
                await asyncio.sleep(0.5)

    async def upload(self, name: str, content: bytes) -> str:
        """Upload a package unless the cluster has it, and return its URI."""
        path = f"/api/packages/gcs/{name}"
        response = await self._client.get(path)  # if it is there, this also keeps it longer
        if response.status_code == httpx.codes.NOT_FOUND:
            response = await self._client.put(path, content=content)
        _raise_for_status(response)
        return f"gcs://{name}"


def ray_address(workspace: Path | None) -> str:
    """Return the address for a run's jobs: its own cluster's while it has one, else ours."""
    if workspace is not None:
        with suppress(FileNotFoundError):  # the file may be deleted at any time
            return (workspace / ADDRESS_FILE).read_text(encoding="utf-8").strip()
    return load_settings().ray_url


def jobs_api(workspace: Path | None = None) -> JobsApi:
    """Return the Jobs API of a run's cluster; without a workspace, of the platform's."""
    own = workspace / TOKEN_FILE if workspace is not None else None
    token = own if own and own.is_file() else load_settings().ray_token_path
    return JobsApi(ray_address(workspace), token)


async def stop_job(submission_id: str, workspace: Path) -> None:
    """Ask the run's cluster to end a job."""
    async with jobs_api(workspace) as jobs:
        await jobs.stop(submission_id)


class TokenFile(httpx.Auth):
    """Authentication with a bearer token from a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send the request with the token in its header."""
        if self._path.is_file():
            token = self._path.read_text(encoding="utf-8").strip()
            request.headers["Authorization"] = f"Bearer {token}"
        yield request


def _read(response: httpx.Response, kind: type[T]) -> T:
    try:
        return parse_model(response.content, kind, f"the answer of {response.request.url}")
    except DamagedFileError as error:
        raise httpx.DecodingError(str(error), request=response.request) from error


def _raise_for_status(response: httpx.Response) -> None:
    """Raise an error with the reason in Ray's answer, which httpx's own error would drop."""
    if response.is_error:
        reason = response.text.strip().rpartition("\n")[2]
        raise httpx.HTTPStatusError(
            f"Ray answered {response.status_code} to {response.request.method} "
            f"{response.request.url}: {reason}",
            request=response.request,
            response=response,
        )


_EPOCH = (1980, 1, 1, 0, 0, 0)  # zip's earliest time, so that equal content makes equal packages


async def upload_code(jobs: JobsApi, workspace: Path, names: Iterable[str]) -> str:
    """Upload files and folders of the workspace and return the package's URI.

    The package is named by its content, so it is not sent again to a cluster that has it.

    Raises:
        UserError: A name is neither a file nor a folder of the workspace.
    """
    package = pack(workspace, names)
    digest = hashlib.sha256(package).hexdigest()[:32]
    return await jobs.upload(f"_ray_pkg_{digest}.zip", package)


def pack(workspace: Path, names: Iterable[str]) -> bytes:
    """Return a zip of the files but bytecode and hidden ones; equal content has equal bytes."""
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
            raise UserError(f"{place}: there is no such file or folder to send to Ray")


def _is_code(path: Path) -> bool:
    return not any(part == "__pycache__" or part.startswith(".") for part in path.parts)
