"""A command of ours joins a cluster, whose nodes the guard let start, or does not start at all."""

import pytest

from pipelines.core.errors import UserError


@pytest.mark.parametrize("address", [None, "", "local"])
def test_no_ray_is_started_past_the_guard(
    address: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray_jobs.connection import connect
    from ray_jobs.train import main

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match="no Ray to run on"):
        connect()
    with pytest.raises(SystemExit, match="2"):
        main("--recipe", "debug")
    assert capsys.readouterr().err.startswith("train: no Ray to run on: submit the command (")
