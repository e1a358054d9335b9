"""The word of a cloud, or of another agent, that it will soon take this machine away.

The setting `PENSTOCK_NOTICE` of a machine says where the word comes from: from the metadata service
of `aws`, `gcp` or `azure`, or from a file that appears. A thread looks every few seconds, so that
no step waits for an answer.

Sources: "Spot Instance interruption notices" (Amazon EC2), "Preemptible VM instances" (Google
Compute Engine), "Scheduled Events for Linux VMs" (Azure). The variables that move the first two to
another address are those of botocore and google-auth.
"""

import json
import logging
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.core.errors import UserError

POLL_S = 5.0  # as Amazon advises; Google's and Azure's notices are 30 s long
_TIMEOUT_S = 2.0
_SHORTEST_S = 30.0  # the notice of who says no time
_AWS = "http://169.254.169.254"
_GCP = "metadata.google.internal"
_AZURE = "http://169.254.169.254"
# Of Azure's events, those after which this machine's memory and processes are gone.
_AZURE_EVENTS = ("Preempt", "Terminate", "Reboot", "Redeploy")

_log = logging.getLogger(__name__)


class MachineNotice(NamedTuple):
    """That this machine goes."""

    reason: str  # who says so
    seconds: float  # until it goes


@contextmanager
def watching(source: str, told: Callable[[MachineNotice], None]) -> Iterator[None]:
    """Within the block call `told`, from another thread, at each look while there is a notice.

    Args:
        source: `aws`, `gcp`, `azure` or the path of a file; nothing is watched if it is empty, and
            in all processes but one of each machine.
        told: Is called again and again, as a run that does not train yet takes no notice.

    Raises:
        UserError: the source is none of these.
    """
    if not source or os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    over = threading.Event()
    look = _SOURCES.get(source) or _file(source)
    thread = threading.Thread(target=_watch, args=(source, look, told, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _watch(
    source: str,
    look: Callable[[], MachineNotice | None],
    told: Callable[[MachineNotice], None],
    over: threading.Event,
) -> None:
    answers, is_told = True, False
    while not over.is_set():
        try:
            notice = look()
        except (OSError, ValueError, KeyError, TypeError) as error:  # it may answer next time
            if answers:
                _log.warning("PENSTOCK_NOTICE=%s: no notice can be read: %s", source, error)
            answers, notice = False, None
        else:
            answers = True
        if notice and not over.is_set():
            if not is_told:
                _log.warning("%s, in %.0f s", *notice)
            is_told = True
            told(notice)
        over.wait(POLL_S)


def _aws() -> MachineNotice | None:
    base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", _AWS).rstrip("/")
    seconds = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _answer(f"{base}/latest/api/token", seconds, method="PUT")
    header = {"X-aws-ec2-metadata-token": token}
    try:
        text = _answer(f"{base}/latest/meta-data/spot/instance-action", header)
    except urllib.error.HTTPError as error:
        if error.code == 404:  # as long as nothing is to happen
            return None
        raise
    action = json.loads(text)
    at = datetime.fromisoformat(action["time"])
    return MachineNotice(f"AWS will {action['action']} this machine", _until(at))


def _gcp() -> MachineNotice | None:
    host = os.environ.get("GCE_METADATA_HOST", _GCP)
    url = f"http://{host}/computeMetadata/v1/instance/preempted"
    if _answer(url, {"Metadata-Flavor": "Google"}).strip() != "TRUE":
        return None
    return MachineNotice("Google Cloud preempts this machine", _SHORTEST_S)


def _azure() -> MachineNotice | None:
    base, header = f"{_AZURE}/metadata", {"Metadata": "true"}
    name = f"{base}/instance/compute/name?api-version=2021-02-01&format=text"
    events = json.loads(_answer(f"{base}/scheduledevents?api-version=2020-07-01", header))["Events"]
    ends = [event for event in events if event["EventType"] in _AZURE_EVENTS]
    # Each machine is told of all machines in its set.
    if not ends or not (mine := _of(_answer(name, header).strip(), ends)):
        return None
    # An event that has begun says no time.
    at = mine["NotBefore"] and parsedate_to_datetime(mine["NotBefore"])
    return MachineNotice(f"Azure: {mine['EventType']} of this machine", _until(at) if at else 0.0)


def _of(machine: str, events: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((event for event in events if machine in event["Resources"]), None)


def _file(source: str) -> Callable[[], MachineNotice | None]:
    path = Path(source)
    if not path.is_absolute():
        raise UserError(f"PENSTOCK_NOTICE={source!r}: it must be aws, gcp, azure or a file's path")

    def look() -> MachineNotice | None:
        found = path.exists()
        return MachineNotice(f"{path} says that this machine goes", _SHORTEST_S) if found else None

    return look


_SOURCES = {"aws": _aws, "gcp": _gcp, "azure": _azure}
# A metadata service is on the machine's own link, where no proxy leads.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _answer(url: str, headers: dict[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310 (http only)
    with _opener.open(request, timeout=_TIMEOUT_S) as answer:
        text: str = answer.read().decode()
    return text


def _until(at: datetime) -> float:
    return max(0.0, (at - datetime.now(UTC)).total_seconds())
