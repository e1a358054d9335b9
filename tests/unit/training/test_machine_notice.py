"""A notice of each cloud, read from a server that answers as the cloud documents."""

import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from pipelines.core.errors import UserError
from pipelines.training import machine_notice
from pipelines.training.machine_notice import MachineNotice, watching
from tests.metadata_service import NAME, MetadataService, metadata_service


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataService]:
    with metadata_service() as service:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"{service.url}/")
        monkeypatch.setenv("GCE_METADATA_HOST", service.host)
        monkeypatch.setattr(machine_notice, "_AZURE", service.url)
        monkeypatch.setattr(machine_notice, "POLL_S", 0.05)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which must not be asked
        yield service


def soon() -> datetime:
    return datetime.now(UTC) + timedelta(seconds=120)


def event(kind: str, machine: str = NAME, at: str | None = None) -> dict[str, object]:
    return {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": [machine],
        "EventStatus": "Scheduled" if at else "Started",
        "NotBefore": at or "",
        "EventSource": "Platform",
    }


def aws(service: MetadataService) -> None:
    service.action = {"action": "terminate", "time": f"{soon():%Y-%m-%dT%H:%M:%SZ}"}


def gcp(service: MetadataService) -> None:
    service.preempted = True


def azure(service: MetadataService) -> None:
    at = format_datetime(soon(), usegmt=True)
    service.events = [event("Freeze"), event("Preempt", "another"), event("Preempt", at=at)]


@pytest.mark.parametrize(
    ("source", "begin", "reason", "seconds"),
    [
        ("aws", aws, "AWS will terminate this machine", 120),
        ("gcp", gcp, "Google Cloud preempts this machine", 30),
        ("azure", azure, "Azure: Preempt of this machine", 120),
    ],
)
def test_a_notice_of_a_cloud(
    service: MetadataService,
    source: str,
    begin: Callable[[MetadataService], None],
    reason: str,
    seconds: float,
) -> None:
    told: list[MachineNotice] = []
    with watching(source, told.append):
        wait(lambda: service.looks > 2)
        assert not told
        begin(service)
        wait(lambda: len(told) > 1)  # again and again
    assert told[0].reason == reason
    assert told[0].seconds == pytest.approx(seconds, abs=5)
    time.sleep(0.2)
    count = len(told)
    time.sleep(0.2)
    assert len(told) == count  # nobody looks any more


def test_azures_events_of_others_are_none_of_ours(service: MetadataService) -> None:
    service.events = [event("Freeze"), event("Preempt", "another")]
    assert machine_notice._azure() is None
    service.events += [event("Terminate")]
    assert machine_notice._azure() == ("Azure: Terminate of this machine", 0)


def test_a_file(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_notice, "POLL_S", 0.05)
    told: list[MachineNotice] = []
    path = tmp_path / "notice"
    with watching(str(path), told.append):
        time.sleep(0.2)
        assert not told
        path.touch()
        wait(lambda: told)
    assert told[0].reason == f"{path} says that this machine goes"


def test_a_service_that_does_not_answer_is_told_once_and_asked_again(
    service: MetadataService, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[MachineNotice] = []
    service.action = {"an answer": "of another kind"}
    with watching("aws", told.append):
        wait(lambda: service.looks > 3)
        aws(service)
        wait(lambda: told)
    lines = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert lines[0] == "PENSTOCK_NOTICE=aws: no notice can be read: 'time'"
    assert lines[1].startswith("AWS will terminate this machine, in 1")
    assert len(lines) == 2


def test_one_process_of_a_machine_looks(
    service: MetadataService, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws(service)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with watching("aws", lambda notice: pytest.fail(notice.reason)):
        time.sleep(0.2)
    monkeypatch.delenv("LOCAL_RANK")
    with watching("", lambda notice: pytest.fail(notice.reason)):
        time.sleep(0.2)
    assert not service.looks


def test_another_source_is_refused() -> None:
    line = "PENSTOCK_NOTICE='AWS': it must be aws, gcp, azure or a file's path"
    with pytest.raises(UserError, match=line), watching("AWS", print):
        pass


def wait(found: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)
