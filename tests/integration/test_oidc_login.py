"""Users log in to a real Airflow by a real OpenID Connect provider of the test's own."""

import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from oidc_provider_mock import User, run_server_in_thread

from pipelines.core.machine import free_port
from pipelines.core.settings import PROJECT, load_settings
from pipelines.platform.airflow_config import write_airflow_config
from pipelines.platform.environment import platform_environment
from pipelines.platform.secrets import ensure_secrets
from tests.airflow_server import api_server

CONFIG = PROJECT / "infra" / "kubernetes" / "oidc" / "webserver_config.py"
FAB = "airflow.providers.fab.auth_manager.fab_auth_manager.FabAuthManager"
USERS = {"anna": ["ml-admins", "others"], "ben": ["ml-users"], "eve": ["others"]}


def user(name: str, groups: list[str]) -> User:
    claims = {"email": f"{name}@localhost", "given_name": name, "groups": groups}
    return User(sub=name, claims=claims)


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an api-server, whose only rows are those of this test."""
    home = tmp_path_factory.mktemp("home")
    users = [user(name, groups) for name, groups in USERS.items()]
    with pytest.MonkeyPatch.context() as patch, run_server_in_thread(user_claims=users) as oidc:
        patch.setenv("PENSTOCK_HOME", str(home))
        patch.setenv("PENSTOCK_AIRFLOW_PORT", str(free_port()))
        settings = load_settings()
        ensure_secrets(settings)
        (settings.secrets / "oidc-secret").write_text(secrets.token_hex())
        write_airflow_config(settings)
        environment = platform_environment(settings) | {
            "AIRFLOW__CORE__AUTH_MANAGER": FAB,
            "AIRFLOW__FAB__CONFIG_FILE": str(CONFIG),
            "AUTHLIB_INSECURE_TRANSPORT": "1",  # the test's provider has no TLS
            "PENSTOCK_SECRETS": str(settings.secrets),
            "PENSTOCK_OIDC_ISSUER": f"http://localhost:{oidc.server_port}",
            "PENSTOCK_OIDC_CLIENT": "penstock",
            "PENSTOCK_OIDC_ADMINS": "ml-admins",
            "PENSTOCK_OIDC_USERS": "ml-users",
            "PENSTOCK_OIDC_SCOPE": "openid email profile groups",
        }
        run = {"env": environment, "check": True, "capture_output": True}
        subprocess.run([sys.executable, PROJECT / "infra" / "images" / "prepare_airflow.py"], **run)
        with api_server(settings.airflow_url, environment, home):
            yield settings.airflow_url


def log_in(airflow: str, name: str) -> httpx.Client:
    """A browser in which this user has said who they are to the provider."""
    browser = httpx.Client(follow_redirects=True, timeout=60, trust_env=False)
    page = browser.get(f"{airflow}/auth/login/oidc")
    assert page.url.path == "/oauth2/authorize", page.text[-2000:]
    answer = browser.post(page.url, data={"sub": name, "action": "authorize"})
    assert answer.url.host == "127.0.0.1", answer.text[-2000:]
    return browser


def asks(browser: httpx.Client, airflow: str, what: str) -> int:
    token = browser.cookies.get("_token")
    headers = {"Authorization": f"Bearer {token}"}
    return browser.get(f"{airflow}/api/v2/{what}", headers=headers).status_code


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_users_group_is_their_role(airflow: str) -> None:
    anna, ben, eve = (log_in(airflow, name) for name in USERS)
    found: dict[str, Any] = {
        who: [asks(browser, airflow, what) for what in ("dags", "config")]
        for who, browser in (("anna", anna), ("ben", ben), ("eve", eve))
    }
    assert found["anna"][0] == found["ben"][0] == 200
    assert found["eve"][0] == 403
    users = httpx.Client(trust_env=False)
    assert users.get(f"{airflow}/api/v2/dags").status_code == 401  # of nobody
    listed = re.findall(r"oidc_\w+", str(_users(airflow, anna)))
    assert {*listed} == {f"oidc_{name}" for name in USERS}
    # Programs: the reconciler, say, and `penstock run`.
    password = load_settings().airflow_password_path.read_text()
    body = {"username": "admin", "password": password}
    answer = users.post(f"{airflow}/auth/token", json=body, timeout=60)
    assert answer.status_code == 201
    assert users.post(f"{airflow}/auth/token", json=body | {"password": "a"}).status_code == 401
    assert _users(airflow, ben).get("users") is None  # only who administers sees them


def _users(airflow: str, browser: httpx.Client) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {browser.cookies.get('_token')}"}
    answer = browser.get(f"{airflow}/auth/fab/v1/users", headers=headers)
    found: dict[str, Any] = answer.json()
    return found
