"""Row 17: the object store errs, stalls and hangs up; or holds what it should not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.settings import PROJECT
from tests.faults.faulty_proxy import Fault, faulty_proxy
from tests.mlflow_server import MlflowServer
from tests.s3_server import s3_bucket

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

LIMIT_S = 400


@pytest.fixture(scope="module")
def texts():
    """A bucket with texts."""
    with s3_bucket("texts") as bucket:
        for number in range(12):
            lines = (f"document {number} has a line {line} of its own" for line in range(400))
            bucket.put_object(Key=f"{number:02}.txt", Body="\n".join(lines).encode())
        yield bucket


@pytest.fixture(scope="module", autouse=True)
def tracking(texts, tmp_path_factory):
    """MLflow, whose clients put artifacts into S3 themselves."""
    texts.meta.client.create_bucket(Bucket="mlflow")
    server = MlflowServer(tmp_path_factory.mktemp("mlflow"), "s3://mlflow/artifacts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", server.url)
        yield
    server.kill()


def job(texts, home: Path, action: str, fault: Fault = "none") -> subprocess.CompletedProcess[str]:
    """A process that makes a dataset version in a bucket of its own, trains on it, or registers."""
    bucket = home.name
    with faulty_proxy(texts.port, fault) as proxy:
        done = subprocess.run(
            [sys.executable, "-m", "tests.faults.object_store_job", str(home), bucket, action],
            cwd=PROJECT,
            env=os.environ
            | {
                "AWS_ENDPOINT_URL": proxy.url,
                "PENSTOCK_HOME": str(home),
                "PENSTOCK_SHARD_CACHE": str(home / "shards"),  # the machine's has them already
                "PENSTOCK_DATASETS_URL": "",
                "PENSTOCK_DATASETS_REMOTE": f"s3://{bucket}/store",
            },
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert fault == "none" or proxy.hurt, f"no request was hurt: {done.stderr[-5000:]}"
        print(f"{action} with {fault}: hurt {dict(proxy.hurt)}")
    return done


def result(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What the process printed last."""
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def new_home(texts, tmp_path_factory, name: str) -> Path:
    """A folder, and a bucket of its name."""
    home: Path = tmp_path_factory.mktemp(f"s3-{name}-")
    texts.meta.client.create_bucket(Bucket=home.name)
    return home


@pytest.fixture(scope="module")
def unhurt(texts, tmp_path_factory) -> dict[str, str]:
    """What comes out where the store does as it should."""
    home = new_home(texts, tmp_path_factory, "unhurt")
    version = result(job(texts, home, "make"))
    return version | result(job(texts, home, "train")) | result(job(texts, home, "register"))


@pytest.mark.parametrize("fault", ["500", "timeout", "reset", "truncated", "slow", "stale"])
def test_row_17_the_object_store(texts, unhurt, tmp_path_factory, record_property, fault):
    home = new_home(texts, tmp_path_factory, fault)
    assert result(job(texts, home, "make", fault)) == made(unhurt)
    assert result(job(texts, home, "train", fault)) == {"model": unhurt["model"]}
    registered = result(job(texts, home, "register", fault))
    assert registered == {"registered": unhurt["registered"]}
    checks = ["success", "data identical", "weights identical", "registered weights identical"]
    record_property("checks", json.dumps(checks))


@pytest.mark.parametrize("wrong", ["truncated", "swapped"])
def test_row_17_a_stored_object_that_is(texts, unhurt, tmp_path_factory, record_property, wrong):
    home = new_home(texts, tmp_path_factory, f"stored-{wrong}")
    version = result(job(texts, home, "make"))
    assert version == made(unhurt)
    place = {"Bucket": home.name, "Key": f"store/{version['shard']}"}
    content = texts.meta.client.get_object(**place)["Body"].read()
    other = content[: len(content) // 2] if wrong == "truncated" else content[::-1]
    texts.meta.client.put_object(**place, Body=other)
    done = job(texts, home, "train")
    assert done.returncode == 2, done.stderr[-5000:]
    line = done.stderr.splitlines()[-1]
    assert "".join(version["shard"].split("/")[-2:]) in line  # its hash
    assert not (home / "trained/outputs/train").exists()
    record_property("checks", json.dumps([f"one line: {line}", "no model"]))


def made(results: dict[str, str]) -> dict[str, str]:
    """Of what came out, the dataset version."""
    return {name: results[name] for name in ("version", "data", "shard")}
