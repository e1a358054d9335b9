"""The project's code from a git bundle in the object store: a change of it needs no image."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from pipelines.core.settings import PROJECT
from pipelines.platform.environment import BIN
from tests.unit.infra.custom_resources import problems
from tests.unit.infra.manifests import one, pods, render

SCRIPT = PROJECT / "infra" / "images" / "fetch-code.sh"
KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture
def store() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)
    return done.stdout.decode().strip()


def fetch(source: str, ref: str, folder: Path, store: str) -> "subprocess.CompletedProcess[str]":
    proxies = dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1")
    path = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [SCRIPT, source, ref, folder],
        env=os.environ | KEYS | proxies | path | {"AWS_ENDPOINT_URL": store},
        capture_output=True,
        text=True,
    )


def test_a_pushed_bundle_is_the_code_after_a_restart(store: str, tmp_path: Path) -> None:
    project, code = tmp_path / "project", tmp_path / "code"
    for folder in (project, code):
        folder.mkdir()
    git(project, "init", "--quiet", "--initial-branch=main")
    client = boto3.client(
        "s3", endpoint_url=store, aws_access_key_id="a", aws_secret_access_key="b"
    )
    client.create_bucket(Bucket="penstock")
    for version in ("one", "two"):
        (project / "stage.py").write_text(f"VERSION = {version!r}\n")
        git(project, "add", "--all")
        git(project, "commit", "--quiet", "--message", version)
        git(project, "bundle", "create", str(tmp_path / "bundle"), "main")
        client.upload_file(str(tmp_path / "bundle"), "penstock", "code/project.bundle")
        fetched = fetch("s3://penstock/code/project.bundle", "main", code, store)
        assert (fetched.returncode, fetched.stderr) == (0, "")
        commit = git(project, "rev-parse", "HEAD")
        assert fetched.stdout == f"code: main is {commit}\n"
        assert (code / "stage.py").read_text() == f"VERSION = {version!r}\n"
        assert git(code, "status", "--porcelain", "--untracked-files=no") == ""
        assert list(code.glob("__pycache__/stage.*.pyc"))
    assert fetch("s3://penstock/code/project.bundle", "no-such", code, store).returncode != 0


def test_all_of_airflow_runs_the_code_that_was_fetched_and_nobody_else_does() -> None:
    resources = render("code")
    assert [problem for each in resources for problem in problems(each)] == []
    for name, pod in pods(resources).items():
        spec = pod["spec"]
        fetching = [c for c in spec.get("initContainers", []) if c["name"] == "code"]
        mounts = spec["containers"][0]["volumeMounts"]
        mounted = {"name": "code", "mountPath": "/opt/penstock", "readOnly": True} in mounts
        assert mounted is bool(fetching) is (spec["serviceAccountName"] == "airflow"), name
    assert one(resources, "Deployment", "scheduler")
