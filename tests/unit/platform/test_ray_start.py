"""No node of Ray starts open to all: the hook by itself, and in the real `ray start`."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines.core.errors import UserError
from pipelines.platform.environment import RAY_START_HOOK
from pipelines.platform.ray_start import TLS_FILES, check_node, guard

LOOPBACK = "127.0.0.1"


@pytest.fixture(autouse=True)
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "ray-token"
    path.write_text("a" * 64)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    for variable in ("RAY_AUTH_TOKEN", "RAY_USE_TLS", *TLS_FILES):
        monkeypatch.delenv(variable, raising=False)
    return path


def test_a_node_on_the_loopback_needs_the_token_only() -> None:
    params = SimpleNamespace(
        node_ip_address=LOOPBACK, dashboard_host="localhost", ray_client_server_port=10001
    )
    guard(params, True)
    assert params.ray_client_server_port is None


@pytest.mark.parametrize("mode", ["disabled", "", None])
def test_authentication_can_not_be_left_out(
    mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE")
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(UserError, match="RAY_AUTH_MODE=token"):
        check_node(LOOPBACK, LOOPBACK)


@pytest.mark.parametrize("content", ["", "\n", None])
def test_nor_can_the_token(content: str | None, token: Path) -> None:
    token.unlink()
    if content is not None:
        token.write_text(content)
    with pytest.raises(UserError, match=str(token)):
        check_node(LOOPBACK, LOOPBACK)


def test_who_names_no_file_is_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    with pytest.raises(UserError, match="set RAY_AUTH_TOKEN_PATH"):
        check_node(LOOPBACK, LOOPBACK)


@pytest.mark.parametrize("content", ["a-token", "", None])
def test_where_kubernetes_is_asked_it_is_that_of_the_account(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = tmp_path / "account"
    monkeypatch.setattr("pipelines.platform.ray_start.ACCOUNT_TOKEN", str(account))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("RAY_ENABLE_K8S_TOKEN_AUTH", "true")
    if content is not None:
        account.write_text(content)
    with nullcontext() if content else pytest.raises(UserError, match=str(account)):
        check_node(LOOPBACK, LOOPBACK)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node-7"])
def test_the_jobs_api_never_leaves_the_loopback_by_itself(host: str) -> None:
    with pytest.raises(UserError, match="HTTP has no TLS"):
        check_node(LOOPBACK, host)


@pytest.mark.parametrize("address", ["10.0.0.7", "node-7", None])
def test_a_node_of_a_cluster_has_tls(
    address: str | None, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="RAY_USE_TLS=1"):
        check_node(address, LOOPBACK)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with pytest.raises(UserError, match=TLS_FILES[0]):
        check_node(address, LOOPBACK)
    for variable in TLS_FILES:
        monkeypatch.setenv(variable, str(token))
    check_node(address, LOOPBACK)


def test_ray_start_itself_ends_before_anything_listens(tmp_path: Path) -> None:
    session = tmp_path / "session"
    environment = dict(os.environ) | {
        "RAY_AUTH_MODE": "disabled",
        "RAY_START_HOOK": RAY_START_HOOK,
        "RAY_TMPDIR": str(session),
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head"]
    options = ["--port=0", f"--node-ip-address={LOOPBACK}", "--disable-usage-stats"]
    ended = subprocess.run([*command, *options], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[-1].startswith("error: Ray would let everyone in")
    assert not session.exists()
