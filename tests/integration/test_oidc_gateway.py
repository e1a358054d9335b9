"""Users of a real OpenID Connect provider in a real MLflow, and before a real Ray's dashboard.

What the gateway does is left to it: the tests ask the provider for the ID token, as it would, and
show it.
"""

import base64
import json
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jwt
import psutil
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import rsa
from oidc_provider_mock import User, run_server_in_thread

from pipelines.core.machine import free_port
from pipelines.core.settings import PROJECT, load_settings
from pipelines.platform.environment import platform_environment
from pipelines.platform.secrets import ensure_secrets
from tests.integration.ray_cluster import ray_cluster

pytestmark = pytest.mark.long

OIDC = PROJECT / "infra" / "kubernetes" / "oidc"
OURS = ["penstock-admins", "penstock-users"]
USERS: dict[str, dict[str, Any]] = {
    "anna": {"groups": ["penstock-admins", "others"]},
    "ben": {"groups": ["penstock-users"]},
    "eve": {"groups": ["others"]},
    "without": {},
    "late": {"groups": OURS, "exp": 1_700_000_000},
    "elsewhere": {"groups": OURS, "iss": "https://other.example"},
}
API = "api/2.0/mlflow"


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    users = [User(sub=name, claims=claims) for name, claims in USERS.items()]
    with run_server_in_thread(user_claims=users) as server:
        yield f"http://localhost:{server.server_port}"


def id_token(provider: str, name: str, client: str = "penstock") -> str:
    """What the gateway gets of the provider when this user has said who they are."""
    back = "https://mlflow.example/oauth2/callback"
    asked = {"client_id": client, "redirect_uri": back, "response_type": "code"}
    asked["scope"] = "openid email profile groups"
    with httpx.Client(base_url=provider, timeout=60, trust_env=False) as http:
        user = {"sub": name, "action": "authorize"}
        sent_back = http.post("/oauth2/authorize", params=asked, data=user).headers["location"]
        grant = {"grant_type": "authorization_code", "redirect_uri": back}
        grant["code"] = httpx.URL(sent_back).params["code"]
        answer = http.post("/oauth2/token", data=grant, auth=(client, "any"))
    token: str = answer.json()["id_token"]
    return token


@contextmanager
def running(
    command: list[str | Path], url: str, log: Path, environment: dict[str, str] | None = None
) -> Iterator[str]:
    """A server, from when it answers."""
    with log.open("w") as output:
        server = psutil.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 240
        while True:
            try:
                httpx.get(f"{url}/health", timeout=5, trust_env=False, verify=False)
                break
            except httpx.TransportError:
                in_time = server.poll() is None and time.monotonic() < deadline
                assert in_time, log.read_text()[-3000:]
                time.sleep(0.5)
        yield url
    finally:
        if server.poll() is None:
            for each in (*server.children(recursive=True), server):
                each.kill()
            server.wait()


@pytest.fixture(scope="module")
def password() -> str:
    return secrets.token_hex()


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory, provider: str, password: str) -> Iterator[str]:
    """A server as the image starts it."""
    folder = tmp_path_factory.mktemp("mlflow")
    (folder / "mlflow-password").write_text(password)
    (folder / "mlflow-session").write_text(secrets.token_hex())
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_HOME", str(folder))
        patch.setenv("PENSTOCK_MLFLOW_PORT", str(port))
        settings = load_settings()
        ensure_secrets(settings)
        environment = platform_environment(settings) | {
            "HOME": str(folder),
            "PYTHONPATH": str(PROJECT),
            "PENSTOCK_PART": "mlflow",
            "PENSTOCK_SECRETS": str(folder),
            "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder}/mlflow.db",
            "MLFLOW_SERVER_ALLOWED_HOSTS": "localhost:*,127.0.0.1:*",
            "PENSTOCK_OIDC_ISSUER": provider,
            "PENSTOCK_OIDC_CLIENT": "penstock",
            "PENSTOCK_OIDC_ADMINS": "penstock-admins",
            "PENSTOCK_OIDC_USERS": "penstock-users",
        }
    command = [PROJECT / "infra" / "images" / "entrypoint.sh", "mlflow", "server"]
    command += ["--app-name=basic-auth", "--workers=1", f"--port={port}", "--no-serve-artifacts"]
    url = f"http://localhost:{port}"
    with running(command, url, folder / "server.log", environment):
        yield url


def asks(url: str, token: str | None = None, how: str = "GET", **more: Any) -> httpx.Response:
    """The answer to who shows this token, or nothing."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(timeout=60, trust_env=False, verify=False) as http:
        return http.request(how, url, headers=headers | more.pop("headers", {}), **more)


@pytest.mark.timeout(600)
def test_a_users_group_is_their_right_in_mlflow(mlflow: str, provider: str, password: str) -> None:
    url = f"{mlflow}/{API}"
    anna, ben, eve, without = (id_token(provider, name) for name in [*USERS][:4])
    user = asks(f"{url}/users/current", anna).json()["user"]
    assert (user["username"], user["is_admin"]) == ("oidc_anna", True)
    made = asks(f"{url}/experiments/create", anna, "POST", json={"name": "of-anna"})
    number = made.json()["experiment_id"]
    # Who is in the other group reads all of it, and changes only what is their own.
    assert asks(f"{url}/experiments/get?experiment_id={number}", ben).status_code == 200
    for change in ("experiments/delete", "experiments/update"):
        body = {"experiment_id": number, "new_name": "of-ben"}
        assert asks(f"{url}/{change}", ben, "POST", json=body).status_code == 403
    body = {"username": "another", "password": "a-password-of-theirs"}
    assert asks(f"{url}/users/create", ben, "POST", json=body).status_code == 403
    assert asks(f"{url}/experiments/create", ben, "POST", json={"name": "b"}).status_code == 200
    for stranger in (eve, without):
        assert asks(f"{url}/users/current", stranger).status_code == 403
        assert asks(f"{mlflow}/v1/traces", stranger, "POST").status_code == 403  # of FastAPI's
    assert asks(f"{url}/users/current").status_code == 401
    assert asks(f"{mlflow}/v1/traces", ben, "POST").status_code not in (401, 403)
    # Programs come with a user and a password, as ever.
    assert asks(f"{url}/users/current", auth=("admin", password)).json()["user"]["is_admin"]
    assert asks(f"{url}/users/current", auth=("admin", "another")).status_code == 401
    users = asks(f"{mlflow}/{API}/users/list", auth=("admin", password)).json()["users"]
    assert {each["username"] for each in users} == {"admin", "oidc_anna", "oidc_ben"}


def test_who_leaves_a_group_leaves_its_rights(mlflow: str, provider: str, password: str) -> None:
    url = f"{mlflow}/{API}"

    def carla(*groups: str) -> httpx.Response:
        claims = {"sub": "carla", "groups": groups}
        assert asks(f"{provider}/users/carla", how="PUT", json=claims).is_success
        return asks(f"{url}/users/list", id_token(provider, "carla"))

    assert carla("penstock-admins").status_code == 200
    token = id_token(provider, "carla")
    # A password of her own would stay, so she gets none: MLflow asks for the one that nobody knows.
    own = {"username": "oidc_carla", "password": "a-password-of-hers"}
    changed = asks(f"{url}/users/update-password", token, "PATCH", json=own)
    assert "Current password" in changed.json()["message"]
    assert asks(f"{url}/users/current", auth=(*own.values(),)).status_code == 401
    carla("penstock-users")
    user = asks(f"{url}/users/current", id_token(provider, "carla")).json()["user"]
    assert user["is_admin"] is False
    assert carla("others").status_code == 403


def forged(token: str, **header: str) -> str:
    """The same claims by somebody else's hand."""
    claims = jwt.decode(token, options={"verify_signature": False})
    match header.get("alg"):
        case "none":
            return jwt.encode(claims, None, algorithm="none")
        case "HS256":
            return jwt.encode(claims, header.pop("key"), algorithm="HS256", headers=header)
        case _:
            key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
            return jwt.encode(claims, key, algorithm="RS256", headers=header)


def test_a_token_that_the_provider_did_not_give_us_now_is_refused(
    mlflow: str, provider: str
) -> None:
    anna = id_token(provider, "anna")
    (key,) = asks(f"{provider}/jwks").json()["keys"]
    head, payload, signature = anna.split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    more = base64.urlsafe_b64encode(json.dumps(claims | {"sub": "admin"}).encode()).rstrip(b"=")
    refused = {
        "ended": id_token(provider, "late"),
        "another issuer's": id_token(provider, "elsewhere"),
        "another client's": id_token(provider, "anna", client="wiki"),
        "another key's": forged(anna),
        "another key's of that name": forged(anna, kid=key["kid"]),
        "unsigned": forged(anna, alg="none"),
        "signed by what is public": forged(anna, alg="HS256", key=key["n"], kid=key["kid"]),
        "changed": f"{head}.{more.decode()}.{signature}",
        "of an unknown key": forged(anna, kid="unknown"),
        "no token": "a",
    }
    answers = {
        name: asks(f"{mlflow}/{API}/users/current", token).status_code
        for name, token in refused.items()
    }
    assert answers == dict.fromkeys(refused, 401)
    assert asks(f"{mlflow}/{API}/users/current", anna).status_code == 200


@contextmanager
def nginx(config: Path, folder: Path, here: dict[str, str]) -> Iterator[str]:
    """A proxy of ours as the cluster has it, but for the addresses and the places of its files."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/bin:/usr/bin")
    if not program:
        pytest.skip("no nginx is installed")
    folder.mkdir()
    text = config.read_text()
    for there, ours in {"/tmp/": f"{folder}/", "/tls/": f"{folder.parent}/", **here}.items():
        assert there in text
        text = text.replace(there, ours)
    (folder / "nginx.conf").write_text(text)
    (port,) = re.findall(r"listen (\d+) ssl", text)
    command = [program, "-c", folder / "nginx.conf", "-g", "daemon off;"]
    with running(command, f"https://localhost:{port}", folder / "log") as url:
        yield url


@pytest.fixture(scope="module")
def dashboard(
    tmp_path_factory: pytest.TempPathFactory, mlflow: str
) -> Iterator[tuple[str, str, str]]:
    """The proxy for users, the one before Ray, and Ray's token."""
    folder = tmp_path_factory.mktemp("dashboard")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
    make += " -subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout tls.key -out tls.crt"
    subprocess.run(make.split(), cwd=folder, check=True, capture_output=True)
    shutil.copy(folder / "tls.crt", folder / "ca.crt")
    with ray_cluster(folder, names=["head"]) as ray:
        token = Path(ray.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
        (written,) = [
            each["spec"]["target"]["template"]["data"]
            for each in yaml.safe_load_all((OIDC / "ray-dashboard.yaml").read_text())
            if each["kind"] == "ExternalSecret"
        ]
        (name,) = written
        (folder / name).write_text(written[name].replace("{{ .token }}", token))
        address = ray.environment["RAY_API_SERVER_ADDRESS"].removeprefix("http://")
        here = {"127.0.0.1:8265": address, "8443 ssl": f"{free_port()} ssl"}
        base = PROJECT / "infra" / "config" / "nginx.conf"
        with nginx(base, folder / "ray-https", here) as before_ray:
            here = {
                "https://ray-https:8443": before_ray,
                "http://mlflow:5000": mlflow,
                "/secrets/": f"{folder}/",
                "8444 ssl": f"{free_port()} ssl",
            }
            with nginx(OIDC / "ray-dashboard.conf", folder / "users", here) as url:
                yield url, before_ray, token


@pytest.mark.timeout(600)
def test_people_look_at_ray_and_change_nothing(
    dashboard: tuple[str, str, str], provider: str
) -> None:
    url, before_ray, token = dashboard
    anna, ben, eve = (id_token(provider, name) for name in ("anna", "ben", "eve"))
    body = {"entrypoint": "echo all is well", "submission_id": "one"}
    assert asks(f"{before_ray}/api/jobs/", token, "POST", json=body).is_success
    for who in (anna, ben):
        assert "Ray" in asks(f"{url}/", who).text
        nodes = asks(f"{url}/api/v0/nodes", who).json()["data"]["result"]["result"]
        assert [node["state"] for node in nodes] == ["ALIVE"]
        jobs = asks(f"{url}/api/jobs/", who)
        assert [job["submission_id"] for job in jobs.json()] == ["one"]
        assert asks(f"{url}/", who, "HEAD").status_code == 200
        for how, path in (
            ("POST", "/api/jobs/"),
            ("POST", "/api/jobs/one/stop"),
            ("DELETE", "/api/jobs/one"),
            ("PUT", "/api/packages/gcs/a.zip"),
            ("PUT", "/api/serve/applications/"),
            ("POST", "/api/authenticate"),  # it answers with the token, as a cookie
            ("PATCH", "/api/jobs/one"),
            ("OPTIONS", "/api/jobs/"),
        ):
            assert asks(url + path, who, how, json=body).status_code == 405, (how, path)
        override = {"X-HTTP-Method-Override": "DELETE"}
        assert asks(f"{url}/api/jobs/one", who, headers=override).json()["submission_id"] == "one"
        seen = [asks(url + path, who) for path in ("/", "/api/jobs/", "/api/authentication_mode")]
        assert not [each for each in seen if token in f"{each.headers}{each.text}"]
    for path in ("/", "/api/jobs/", "/static/js/any.js", "/user"):
        assert asks(url + path, eve).status_code in (403, 404), path
        assert asks(url + path).status_code in (401, 404), path
        assert asks(url + path, token).status_code in (401, 404), path
    assert asks(f"{url}/user", anna).status_code == 404
    # Ray itself lets nobody in without the token.
    assert asks(f"{before_ray}/api/jobs/").status_code == 401
    assert asks(f"{before_ray}/api/jobs/", anna).status_code == 403
