"""The images' files: linted, and saying what the local platform says; scripts run for real."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path

import pytest

from infra.images import prepare_airflow
from pipelines.core.settings import PROJECT, load_settings
from pipelines.loading.sources.gpu_readers import CONFIG, why_not
from pipelines.platform.environment import BIN, client_variables, server_variables
from pipelines.platform.secrets import ensure_secrets
from pipelines.registry.signing import public_key

IMAGES = PROJECT / "infra" / "images"
DOCKERFILE = (IMAGES / "Dockerfile").read_text()
SCRIPTS = [
    *IMAGES.glob("*.sh"),
    *(PROJECT / "infra").glob("*.sh"),
    *(PROJECT / "infra" / "slurm").iterdir(),
    *(PROJECT / "infra" / "ssh").glob("*.sh"),
    PROJECT / ".ci" / "run",
]
# Of the loopback, of one machine's folders, or of whom one talks to: not an image's to say.
PLACES = re.compile(
    r".*(_URI|_ADDRESS|_PORT|_HOME|_PATH|_PROJECT|PROXY|proxy|WINDOWS_OR_OSX_CLUSTER)$"
)


def image_environment() -> dict[str, str]:
    base = DOCKERFILE.partition("\nFROM ")[2].partition("\nFROM ")[0]
    block = re.search(r"^ENV (.*?[^\\])$", base, re.MULTILINE | re.DOTALL)
    assert block
    return dict(pair.split("=", 1) for pair in block[1].replace("\\\n", " ").split())


def test_the_dockerfile_is_clean() -> None:
    lint = subprocess.run([BIN / "hadolint", IMAGES / "Dockerfile"], capture_output=True, text=True)
    assert (lint.returncode, lint.stdout) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_clean(script: Path) -> None:
    lint = subprocess.run([BIN / "shellcheck", script], capture_output=True, text=True)
    assert (lint.returncode, lint.stdout) == (0, "")


def test_a_process_in_an_image_has_what_one_of_the_local_platform_has(tmp_path: Path) -> None:
    settings = load_settings()
    wanted = client_variables(settings)
    wanted |= {
        name: value
        for name, value in server_variables(settings, tmp_path).items()
        if name
        in ("RAY_START_HOOK", "RAY_raylet_start_wait_time_s", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION")
    }
    wanted = {name: value for name, value in wanted.items() if not PLACES.match(name)}
    assert wanted.items() <= image_environment().items()
    assert wanted["RAY_AUTH_MODE"] == "token"


def test_each_image_is_pinned_locked_and_nobodys() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    outside = {source for source, _ in stages} - {name for _, name in stages}
    assert outside == {"docker.io/library/python:3.11-slim-bookworm@${PYTHON_DIGEST}"}
    assert "ARG PYTHON_DIGEST\n" in DOCKERFILE  # no default: what is not pinned is not built
    assert (IMAGES / "packages.sh").read_text().count("--constraint requirements.lock") == 2
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    for target, extra in {
        "airflow": "airflow",
        "mlflow": "mlflow",
        "ray-cpu": "ray",
        "ray-cuda": "ray",
    }.items():
        stage = DOCKERFILE.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
        packages = DOCKERFILE.partition(f" AS {target}-packages\n")[2].partition("\nFROM ")[0]
        assert "\nUSER 1000:1000\n" in stage
        assert f"./packages.sh {extra}" in packages
        assert extra in extras["optional-dependencies"]
    airflow = DOCKERFILE.partition(" AS airflow\n")[2].partition("\nFROM ")[0]
    assert "AIRFLOW_CONFIG=/home/penstock/airflow.cfg" in airflow  # whose HOME the probes have, too
    assert "useradd --uid 1000 --create-home penstock" in DOCKERFILE
    cuda = DOCKERFILE.partition(" AS ray-cuda\n")[2].partition("\nFROM ")[0]
    assert f"COPY infra/config/cufile.json {CONFIG}" in cuda
    assert "NVIDIA_GDS=enabled" in cuda


def test_the_dev_container_is_a_target_of_the_same_file() -> None:
    folder = PROJECT / ".devcontainer"
    container = json.loads((folder / "devcontainer.json").read_text())
    build = container["build"]
    assert (folder / build["dockerfile"]).resolve() == IMAGES / "Dockerfile"
    assert f" AS {build['target']}\n" in DOCKERFILE
    assert set(build["args"]) <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))


def test_cufile_reads_without_falling_back(tmp_path: Path) -> None:
    """As the loader reads it: compatibility mode is off, and nothing but the driver is missing."""
    import torch

    config = PROJECT / "infra" / "config" / "cufile.json"
    (tmp_path / "shard").write_bytes(b"a" * 4096)
    (tmp_path / "driver").mkdir()
    reason = why_not(
        tmp_path / "shard",
        torch.device("cuda"),
        driver=tmp_path / "driver",
        environ={"CUFILE_ENV_PATH_JSON": str(config)},
        try_read=lambda path, device: None,
    )
    assert reason is None
    assert json.loads(config.read_text())["properties"]["allow_compat_mode"] is False


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "secrets"
    subprocess.run([PROJECT / "infra" / "make-secrets.sh", folder], check=True)
    return folder


def test_secrets_are_made_once_for_their_owner_and_are_all_that_the_platform_makes(
    secrets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in secrets.iterdir()}
    subprocess.run([PROJECT / "infra" / "make-secrets.sh", secrets], check=True)
    assert {path.name: path.read_bytes() for path in secrets.iterdir()} == before
    assert secrets.stat().st_mode & 0o777 == 0o700
    tokens = [name for name in before if re.search("password|session|jwt|token|fernet", name)]
    assert len({before[name] for name in tokens}) == len(tokens)
    assert not any(before[name].endswith(b"\n") for name in tokens)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    settings = load_settings()
    ensure_secrets(settings)
    locally = {path.name for path in settings.secrets.iterdir()}
    assert locally - {"airflow-users.json"} <= before.keys()  # of the simple auth manager
    assert public_key(secrets / "model-signing.pem").name in before


@pytest.mark.parametrize("part", ["mlflow", "ray"])  # airflow's: tests/integration/test_postgres.py
def test_an_entrypoint_needs_no_rights(part: str, secrets: Path) -> None:
    """As the images' user, where this one may become it, and in code that it can't write to."""
    with tempfile.TemporaryDirectory() as folder:
        code, home, mounted = (Path(folder) / name for name in ("code", "home", "secrets"))
        shutil.copytree(IMAGES, code)
        shutil.copytree(secrets, mounted)
        home.mkdir()
        for path, mode in ((Path(folder), 0o755), (code, 0o555), (mounted, 0o755)):
            path.chmod(mode)
        become = []
        if os.geteuid() == 0:
            os.chown(home, 1000, 1000)
            drop = "--reuid=1000 --regid=1000 --clear-groups --bounding-set=-all --no-new-privs"
            become = ["setpriv", *drop.split()]
        environment = {
            "PATH": os.defpath,
            "HOME": str(home),
            "PENSTOCK_PART": part,
            "PENSTOCK_SECRETS": str(mounted),
            "MLFLOW_BACKEND_STORE_URI": "postgresql+psycopg://penstock@postgres:5432/mlflow",
            "MLFLOW_TRACKING_USERNAME": "admin",
        }
        started = subprocess.run(
            [*become, code / "entrypoint.sh", "sh", "-c", 'env; stat -c "%u %a %n" ~/* ~/.pgpass'],
            env=environment,
            cwd=code,
            check=True,
            capture_output=True,
            text=True,
        )
    lines = started.stdout.splitlines()
    user = 1000 if become else os.getuid()
    written = {line.rpartition("/")[2] for line in lines if line.startswith(f"{user} 600 ")}
    of_mlflow = {"mlflow-auth.ini"} if part == "mlflow" else set()
    assert written == {".pgpass", "ca-bundle.crt"} | of_mlflow
    password = (secrets / "mlflow-password").read_text()
    holders = {line.partition("=")[0] for line in lines if line.endswith(f"={password}")}
    admin = {"MLFLOW_AUTH_ADMIN_PASSWORD"} if part == "mlflow" else set()
    assert holders == {"MLFLOW_TRACKING_PASSWORD"} | admin


def test_each_start_of_a_node_renews_its_certificate_for_all_of_its_names(secrets: Path) -> None:
    """As a user without rights, where this one may become it: root may write to any file."""
    with tempfile.TemporaryDirectory() as place:
        code, authority, folder = (Path(place) / name for name in ("code", "authority", "tls"))
        shutil.copytree(IMAGES, code)
        shutil.copytree(secrets, authority)
        folder.mkdir()
        for path in (Path(place), authority):
            path.chmod(0o755)
        become = []
        if os.geteuid() == 0:
            os.chown(folder, 1000, 1000)
            become = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"]
        command = [*become, code / "node-certificate.sh", folder, "ray-head", "10.0.0.4"]
        environment = {"PATH": os.defpath, "RAY_CA": str(authority)}
        made = []
        for _ in range(2):  # the second time the authority's file is there, and read-only
            subprocess.run(command, env=environment, cwd=place, check=True)
            made.append((folder / "tls.crt").read_bytes())
        assert made[0] != made[1]
        for name in ("-verify_hostname ray-head", "-verify_ip 10.0.0.4", "-verify_ip 127.0.0.1"):
            verify = f"openssl verify -CAfile {folder}/ca.crt {name} {folder}/tls.crt"
            subprocess.run(verify.split(), check=True, capture_output=True)
        of_certificate = f"openssl x509 -in {folder}/tls.crt -noout -pubkey"
        of_key = f"openssl pkey -in {folder}/tls.key -pubout"
        assert subprocess.check_output(of_certificate.split()) == subprocess.check_output(
            of_key.split()
        )
        assert sorted(path.name for path in folder.iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
        assert (folder / "tls.key").stat().st_mode & 0o777 == 0o600


def test_what_airflow_needs_once_is_tried_again_where_a_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "airflow-password").write_text("a password\n")
    monkeypatch.setenv("PENSTOCK_SECRETS", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda _: None)
    calls = []

    def airflow(*words: str) -> None:
        calls.append(" ".join(words[:2]))
        if words[0] == "db" and calls.count(calls[-1]) == 1:  # both fail once
            raise OSError("no such host")
        if words[:2] == ("users", "create"):
            assert words[words.index("--password") + 1] == "a password"
        if words[:2] == ("pools", "get") and "pools set" not in calls:
            raise SystemExit("Pool gpu_jobs does not exist")

    monkeypatch.setattr("infra.images.prepare_airflow.airflow", airflow)
    prepare_airflow.prepare()
    assert calls == [
        *("db check", "db check", "db migrate", "db check", "db migrate"),
        *("users create", "pools get", "pools set"),
    ]
    said = capsys.readouterr().err
    assert said.count("no such host") == 2
    assert "a password" not in said
    calls[:] = ["pools set", "db check", "db migrate"]
    prepare_airflow.prepare()
    assert calls[-1] == "pools get"  # a pool that is there keeps its size
