"""Row 17: the object store errs, stalls and hangs up; or holds what it should not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.settings import PROJECT
from tests.faults.faulty_proxy import Fault, faulty_proxy
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


def job(texts, home: Path, action: str, fault: Fault = "none") -> subprocess.CompletedProcess[str]:
    """A process that makes a dataset version in a bucket of its own, or trains on it."""
    bucket = home.name
    with faulty_proxy(texts.port, fault) as proxy:
        done = subprocess.run(
            [sys.executable, "-m", "tests.faults.object_store_job", str(home), bucket, action],
            cwd=PROJECT,
            env=os.environ
            | {
                "AWS_ENDPOINT_URL": proxy.url,
                "PENSTOCK_HOME": str(home),
                "PENSTOCK_DATASETS_URL": "",
                "PENSTOCK_DATASETS_REMOTE": f"s3://{bucket}/store",
            },
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert fault == "none" or proxy.hurt, "no request was hurt"
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
    return result(job(texts, home, "make")) | result(job(texts, home, "train"))


@pytest.mark.parametrize("fault", ["500", "timeout", "reset", "truncated", "slow"])
def test_row_17_the_object_store(texts, unhurt, tmp_path_factory, record_property, fault):
    home = new_home(texts, tmp_path_factory, fault)
    assert result(job(texts, home, "make", fault)) == without(unhurt, "model")
    assert result(job(texts, home, "train", fault)) == {"model": unhurt["model"]}
    record_property("checks", json.dumps(["success", "data identical", "weights identical"]))


@pytest.mark.parametrize("wrong", ["truncated", "swapped"])
def test_row_17_a_stored_object_that_is(texts, unhurt, tmp_path_factory, record_property, wrong):
    home = new_home(texts, tmp_path_factory, f"stored-{wrong}")
    made = result(job(texts, home, "make"))
    assert made == without(unhurt, "model")
    place = {"Bucket": home.name, "Key": f"store/{made['shard']}"}
    content = texts.meta.client.get_object(**place)["Body"].read()
    other = content[: len(content) // 2] if wrong == "truncated" else content[::-1]
    texts.meta.client.put_object(**place, Body=other)
    done = job(texts, home, "train")
    assert done.returncode == 2, done.stderr[-5000:]
    line = done.stderr.splitlines()[-1]
    assert made["shard"] in line
    assert not (home / "trained/outputs/train").exists()
    record_property("checks", json.dumps([f"one line: {line}", "no model"]))


def without(results: dict[str, str], key: str) -> dict[str, str]:
    return {name: each for name, each in results.items() if name != key}
