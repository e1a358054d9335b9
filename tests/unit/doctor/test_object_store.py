"""The DVC remote: a folder, and a bucket of a real S3 API."""

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from pipelines.core.recipe_files import load_recipe
from pipelines.doctor.findings import FaultError, NotHereError
from pipelines.doctor.object_store import datasets_remote, judge_clock, s3, s3_remote
from tests.s3_server import s3_bucket
from tests.unit.doctor.recordings import told


@pytest.fixture(scope="module")
def bucket():
    with s3_bucket("doctor") as made:
        yield made


@pytest.mark.parametrize("remote", ["s3://doctor", "s3://doctor/some/prefix/"])
def test_a_bucket_is_written_read_and_left_clean(bucket, remote):
    (state, saw), (clock_state, _) = told(s3_remote(remote))
    assert state == clock_state == "ok"
    assert saw.startswith(f"{remote}: put, get, multipart upload, delete in")
    assert not list(bucket.objects.all())
    assert not list(bucket.multipart_uploads.all())


def test_all_that_lies_in_s3_is_looked_at(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_DATASETS_REMOTE", "s3://doctor/datasets")
    assert told(datasets_remote()) == [("ok", "s3://doctor/datasets is a bucket: see S3")]
    found = told(s3(load_recipe("debug", ["train.checkpoints=s3://doctor/checkpoints"])))
    places = [saw.split(":")[1] for _, saw in found if "put, get" in saw]
    assert places == ["//doctor/checkpoints", "//doctor/datasets"]
    monkeypatch.setenv("PENSTOCK_DATASETS_REMOTE", str(tmp_path))
    with pytest.raises(NotHereError):
        list(s3(load_recipe("debug")))


def test_a_bucket_that_is_not_there_is_told(bucket):
    with pytest.raises(FaultError, match="NoSuchBucket") as error:
        list(s3_remote("s3://no-such-bucket"))
    assert "AWS_ENDPOINT_URL" in error.value.mend


def test_a_server_that_is_away_is_told(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(FaultError, match="Could not connect"):
        list(s3_remote("s3://doctor"))


def test_a_server_that_swallows_all_is_given_up(bucket, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setattr("pipelines.doctor.object_store._TIMEOUT_S", 0.2)
        with pytest.raises(FaultError, match="put: Read timeout"):
            list(s3_remote("s3://doctor"))


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("AWS_ENDPOINT_URL", "no url", "Invalid endpoint"),
        ("AWS_PROFILE", "no-such-profile", "no-such-profile"),
    ],
)
def test_a_setting_that_boto_refuses_is_told(bucket, monkeypatch, variable, value, words):
    monkeypatch.setenv(variable, value)
    with pytest.raises(FaultError, match=words):
        list(s3_remote("s3://doctor"))


@pytest.fixture
def strict(bucket):
    """The server looks at keys from now on."""
    url = f"http://127.0.0.1:{bucket.port}/moto-api/reset-auth"
    httpx.post(url, content=b"0").raise_for_status()
    yield
    httpx.post(url, content=b"inf").raise_for_status()


def test_a_clock_that_s3_refuses_is_told(bucket, monkeypatch):
    """As AWS answers it (S3, error responses)."""
    said = "The difference between the request time and the current time is too large."
    body = f"<Error><Code>RequestTimeTooSkewed</Code><Message>{said}</Message></Error>".encode()

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{httpd.server_port}")
        with pytest.raises(FaultError, match="RequestTimeTooSkewed") as error:
            list(s3_remote("s3://doctor"))
        httpd.shutdown()
    assert "chrony" in error.value.mend


def test_keys_that_s3_does_not_know_are_told(strict):
    with pytest.raises(FaultError, match=r"put: .*InvalidAccessKeyId") as error:
        list(s3_remote("s3://doctor"))
    assert "keys" in error.value.mend


@pytest.mark.parametrize(("skew", "state"), [(2, "ok"), (-120, "warning"), (1000, "problem")])
def test_the_clocks_of_both(skew, state):
    now = time.time()
    assert told(judge_clock(now + skew, now))[0][0] == state


def test_a_folder_is_written_to_and_left_clean(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_DATASETS_REMOTE", str(tmp_path / "store"))
    assert "is made with the first" in told(datasets_remote())[0][1]
    (tmp_path / "store").mkdir()
    assert told(datasets_remote()) == [("ok", f"{tmp_path}/store can be written")]
    assert not list((tmp_path / "store").iterdir())


@pytest.mark.parametrize(
    ("remote", "saw"),
    [
        ("/proc/self", "/proc/self can't be written: "),  # of a kind that nobody can write to
        ("/dev/null/store", "/dev/null can't be written: Not a directory"),
        ("ssh://host/store", "ssh://host/store is neither a folder nor s3://"),
    ],
)
def test_a_remote_that_can_not_be_written_is_told(remote, saw, monkeypatch):
    monkeypatch.setenv("PENSTOCK_DATASETS_REMOTE", remote)
    ((state, words),) = told(datasets_remote())
    assert state == "problem"
    assert words.replace(str(Path("/proc/self").readlink()), "self").startswith(saw)
