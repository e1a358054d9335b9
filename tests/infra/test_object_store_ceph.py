"""All that the product does with S3, against Ceph's gateway: a store that moto did not write."""

import json
import os
import subprocess
import sys
import time

import boto3
import pytest

from pipelines.core.settings import PROJECT
from tests.conftest import PENSTOCK
from tests.infra.ceph import Gateway, object_gateway
from tests.infra.runbook import commands
from tests.s3_server import STORE

pytestmark = [pytest.mark.infra, pytest.mark.timeout(1200)]

# Those that name a bucket of `tests.s3_server`: they run on moto in `make test`.
SAME_TESTS = (
    "tests/unit/data/reading/test_sources_s3.py",
    "tests/unit/doctor/test_object_store.py",
    "tests/unit/datasets/test_datasets_s3.py",
    "tests/unit/loading/sources/test_object_store.py",
    "tests/unit/tracking/test_artifacts.py",
    "tests/unit/registry/test_registry.py",
    "tests/unit/training/checkpoint/test_checkpointer.py",
)


@pytest.fixture(scope="module")
def gateway():
    with object_gateway() as running:
        yield running


@pytest.fixture
def client(gateway, monkeypatch):
    for variable, value in gateway.variables().items():
        monkeypatch.setenv(variable, value)
    return boto3.client("s3")


def doctor(url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PENSTOCK, "doctor", "--s3", url, "--json"], capture_output=True, text=True, timeout=120
    )


def test_readers_datasets_checkpoints_and_the_registry_work_on_it(gateway: Gateway):
    variables = gateway.variables()
    url = variables.pop("AWS_ENDPOINT_URL")
    environment = {name: value for name, value in os.environ.items() if name[:4] != "AWS_"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *SAME_TESTS],
        cwd=PROJECT,
        env=environment | variables | {STORE: url},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    print(done.stdout.splitlines()[-1])


def test_the_doctor_finds_all_that_we_need_and_leaves_nothing(client):
    client.create_bucket(Bucket="examined")
    done = doctor("s3://examined/team")
    told = json.loads(done.stdout)
    assert (done.returncode, told["state"]) == (0, "ok"), told
    (part,) = told["parts"].values()
    assert {each["check"] for each in part} >= {"ranges", "multipart upload", "conditional write"}
    assert "Contents" not in client.list_objects_v2(Bucket="examined")


def test_the_doctor_names_what_a_policy_forbids(client, gateway):
    client.create_bucket(Bucket="forbidden")
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": ["s3:DeleteObject"],
        "Resource": ["arn:aws:s3:::forbidden/*"],
    }
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    client.put_bucket_policy(Bucket="forbidden", Policy=json.dumps(policy))
    done = doctor("s3://forbidden")
    told = {each["check"]: each for each in json.loads(done.stdout)["parts"]["s3://forbidden"]}
    assert done.returncode == 2
    assert told["ranges"]["state"] == "ok"
    for check in ("listing and removal", "removal"):
        assert told[check]["state"] == "problem"
        assert "policy" in told[check]["fix"]


def test_what_was_removed_is_had_back(client, gateway, tmp_path):
    client.create_bucket(Bucket="kept")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "aws"], check=True)
    subprocess.run([tmp_path / "aws" / "bin" / "pip", "install", "--quiet", "awscli"], check=True)
    key = "mlflow/1/model.safetensors"

    def run(*headings: str) -> None:
        path = f"{tmp_path / 'aws' / 'bin'}:{os.environ['PATH']}"
        names = {"PATH": path, "BUCKET": "kept", "KEY": key, "AWS_DEFAULT_REGION": "us-east-1"}
        script = ["bash", "-euo", "pipefail", "-c", commands(*headings)]
        subprocess.run(script, cwd=PROJECT, env=os.environ | names, check=True)

    run("Object store", "Keep removed objects for a while")
    kept = {
        rule["Prefix"]: rule["NoncurrentVersionExpiration"]["NoncurrentDays"]
        for rule in client.get_bucket_lifecycle_configuration(Bucket="kept")["Rules"]
    }
    assert kept == {"mlflow/": 30, "datasets/": 30, "checkpoints/": 1, "postgres/": 1}
    # A store may take some seconds (S3: minutes) until it keeps versions.
    deadline = time.monotonic() + 60
    while "VersionId" not in client.put_object(Bucket="kept", Key=key, Body=b"weights"):
        assert time.monotonic() < deadline
        time.sleep(1)
    client.delete_object(Bucket="kept", Key=key)
    assert "Contents" not in client.list_objects_v2(Bucket="kept")
    run("Object store", "Restore a removed object")
    assert client.get_object(Bucket="kept", Key=key)["Body"].read() == b"weights"
