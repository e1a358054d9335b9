"""The end of a node's certificate, of one that its own script has made."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from pipelines.core.settings import PROJECT
from pipelines.doctor.clock import assess_certificate, certificate
from pipelines.doctor.findings import NotHereError, State

DAY = 86400


def test_one_that_has_just_been_made_lasts_a_year(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([PROJECT / "infra" / "make-secrets.sh", tmp_path / "secrets"], check=True)
    subprocess.run(
        [PROJECT / "infra" / "images" / "node-certificate.sh", tmp_path / "tls", "a-node"],
        env=os.environ | {"RAY_CA": str(tmp_path / "secrets")},
        check=True,
    )
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", str(tmp_path / "tls" / "tls.crt"))
    (seen,) = certificate()
    assert (seen.state, seen.saw) == (State.OK, "it ends in 365 days")


def test_without_tls_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    with pytest.raises(NotHereError):
        list(certificate())


@pytest.mark.parametrize(
    ("days", "state"), [(31, State.OK), (29, State.WARNING), (-1, State.PROBLEM)]
)
def test_it_warns_a_month_before(days: int, state: State) -> None:
    now = time.time()
    assert assess_certificate(now + days * DAY, now).state is state
