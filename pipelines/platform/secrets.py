"""Generated passwords, tokens and keys: made once, only for the owner, never in argv or logs."""

import base64
import json
import secrets
from pathlib import Path

from pipelines.core.settings import Settings
from pipelines.core.storage import write_text
from pipelines.registry.signing import ensure_key_pair


def ensure_secrets(settings: Settings) -> None:
    """Make only the missing secrets, so that a password lasts as long as the home."""
    settings.secrets.mkdir(parents=True, exist_ok=True)
    settings.secrets.chmod(0o700)
    password = _ensure(settings.airflow_password_path, secrets.token_urlsafe(18))
    # Airflow's simple auth manager prints passwords that it generates, but not a given one.
    _write(airflow_users_path(settings), json.dumps({settings.airflow_user: password}))
    _ensure(settings.secrets / "ray-token", secrets.token_hex(32))
    _ensure(settings.secrets / "airflow-jwt", secrets.token_hex(64))
    _ensure(settings.secrets / "airflow-session", secrets.token_hex(32))
    fernet_key = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()
    _ensure(settings.secrets / "airflow-fernet", fernet_key)
    if settings.signing_key.parent == settings.secrets:  # else a user gave it
        ensure_key_pair(settings.signing_key)


def airflow_users_path(settings: Settings) -> Path:
    """Return the password file that Airflow itself reads."""
    return settings.secrets / "airflow-users.json"


def serve_token(settings: Settings) -> str:
    """Return the API key for clients of `penstock serve`."""
    settings.secrets.mkdir(parents=True, exist_ok=True, mode=0o700)
    return _ensure(serve_token_path(settings), secrets.token_urlsafe(24))


def serve_token_path(settings: Settings) -> Path:
    """Return the path of the API key's file."""
    return settings.secrets / "serve-token"


def _ensure(path: Path, value: str) -> str:
    if not path.exists():
        _write(path, value)
    path.chmod(0o600)
    return path.read_text()


def _write(path: Path, value: str) -> None:
    write_text(path, value, mode=0o600)
