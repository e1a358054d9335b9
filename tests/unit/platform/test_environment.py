"""The exports survive any path; secrets are not among them."""

import subprocess
from pathlib import Path

import pytest

from pipelines.core.settings import load_settings
from pipelines.platform.environment import (
    BIN,
    client_variables,
    platform_environment,
    shell_exports,
)
from pipelines.platform.secrets import ensure_secrets

AWKWARD = 'it\'s 50% "odd" $HOME; #1 `id`'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / AWKWARD))
    return tmp_path / AWKWARD


def test_a_shell_reads_back_every_export_as_it_is(home: Path) -> None:
    settings = load_settings()
    script = f"{shell_exports(settings)}\nenv -0"
    output = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    seen = dict(entry.split("=", 1) for entry in output.stdout.split("\0") if entry)
    assert client_variables(settings).items() <= seen.items()
    assert seen["PENSTOCK_HOME"] == str(home)
    assert seen["PATH"].split(":")[0] == str(BIN)


def test_a_platform_process_reaches_the_loopback_past_a_proxy(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "corp.example")
    monkeypatch.delenv("no_proxy", raising=False)
    environment = platform_environment(load_settings())
    assert environment["HTTP_PROXY"] == "http://proxy.example:3128"
    for variable in ("NO_PROXY", "no_proxy"):
        assert environment[variable] == "corp.example,127.0.0.1,localhost"


def test_no_secret_is_in_the_environment(home: Path) -> None:
    settings = load_settings()
    ensure_secrets(settings)
    values = set(platform_environment(settings).values())
    for path in settings.secrets.iterdir():
        assert path.read_text() not in values


def test_up_makes_the_key_pair_that_models_are_signed_with(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = home / "secrets" / "model-signing.pem"
    monkeypatch.setenv("PENSTOCK_SIGNING_KEY", str(tmp_path / "given.pem"))
    ensure_secrets(load_settings())
    assert not key.exists()
    assert not (tmp_path / "given.pem").exists()  # whoever names one, has one
    monkeypatch.delenv("PENSTOCK_SIGNING_KEY")
    ensure_secrets(load_settings())
    assert (key.stat().st_mode & 0o777, key.with_name("model-signing.pem.pub").exists()) == (
        0o600,
        True,
    )


def test_platform_processes_write_bytecode_and_find_our_commands_first(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    environment = platform_environment(load_settings())
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    assert environment["PATH"].split(":")[0] == str(BIN)
