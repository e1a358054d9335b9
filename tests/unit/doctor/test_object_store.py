"""The DVC remote: a folder, and a bucket of a real S3 API."""

import re
import socket
import sys
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from pipelines.core.errors import UserError, one_line
from pipelines.doctor.findings import FaultError, NotHereError
from pipelines.doctor.object_store_check import (
    assess_store_clock,
    datasets_remote,
    examine_store,
    s3,
    s3_remote,
)
from pipelines.recipe.recipe_files import load_recipe
from tests.s3_server import NEEDS_MOTO, s3_bucket
from tests.unit.doctor.recordings import told


@pytest.fixture(scope="module")
def bucket():
    with s3_bucket("doctor") as made:
        yield made


@pytest.mark.parametrize("remote", ["s3://doctor", "s3://doctor/some/prefix/"])
def test_a_bucket_is_written_read_and_left_clean(bucket, remote):
    ((state, saw),) = told(s3_remote(remote))
    assert state == "ok"
    assert saw.startswith(f"{remote}: read and write, ranges, multipart upload, aborted upload, ")
    assert re.search(r"removal, clock in \d+\.\d\d s$", saw)
    assert not list(bucket.objects.all())
    assert not list(bucket.multipart_uploads.all())


def test_each_need_of_a_bucket_is_a_line_of_its_own(bucket):
    found = {finding.check: finding for finding in examine_store("s3://doctor/some")}
    assert [*found][:3] == ["read and write", "ranges", "multipart upload"]
    assert {finding.state for finding in found.values()} == {"ok"}
    assert not list(bucket.objects.all())


@NEEDS_MOTO  # which takes any token
def test_keys_that_end_and_are_not_renewed_are_told(bucket, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-a-session")
    keys = {finding.check: finding for finding in examine_store("s3://doctor")}["expiring keys"]
    assert (keys.state, "credential_process" in keys.fix) == ("warning", True)


@pytest.mark.parametrize("url", ["doctor/some", "http://doctor", "s3://"])
def test_what_is_no_bucket_is_one_line(url):
    with pytest.raises(UserError, match=f"--s3 {url}: give a bucket"):
        examine_store(url)


def test_a_refusal_without_a_message_is_told_by_its_cause():
    refused = FileNotFoundError(None)
    assert one_line(refused) == "FileNotFoundError"
    refused.__cause__ = ValueError("An error occurred (NoSuchBucket)")
    assert one_line(refused) == "An error occurred (NoSuchBucket)"


def test_all_that_lies_in_s3_is_looked_at(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_DATASETS_REMOTE", "s3://doctor/datasets")
    assert told(datasets_remote()) == [("ok", "s3://doctor/datasets is a bucket: see S3")]
    found = told(s3(load_recipe("debug", ["train.checkpoints=s3://doctor/checkpoints"])))
    places = [saw.split(":")[1] for _, saw in found if "read and write" in saw]
    assert places == ["//doctor/checkpoints", "//doctor/datasets"]
    monkeypatch.setenv("PENSTOCK_DATASETS_REMOTE", str(tmp_path))
    with pytest.raises(NotHereError):
        list(s3(load_recipe("debug")))


def test_a_bucket_that_is_not_there_is_told(bucket):
    ((state, saw),) = told(s3_remote("s3://no-such-bucket"))
    assert state == "problem"
    assert "NoSuchBucket" in saw
    (refused, *_) = s3_remote("s3://no-such-bucket")
    assert "AWS_ENDPOINT_URL" in refused.fix


def test_a_server_that_is_away_is_told(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    ((state, saw),) = told(s3_remote("s3://doctor"))
    assert (state, "Could not connect" in saw) == ("problem", True)


def test_a_server_that_swallows_all_is_given_up(bucket, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setattr("pipelines.doctor.object_store_check._TIMEOUT_S", 0.2)
        ((state, saw),) = told(s3_remote("s3://doctor"))
    assert (state, "read and write: Read timeout" in saw) == ("problem", True)


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
        (refused, *_) = s3_remote("s3://doctor")
        httpd.shutdown()
    assert "RequestTimeTooSkewed" in refused.saw
    assert "chrony" in refused.fix


@NEEDS_MOTO
def test_keys_that_s3_does_not_know_are_told(strict):
    (refused, *_) = s3_remote("s3://doctor")
    assert "InvalidAccessKeyId" in refused.saw
    assert "keys" in refused.fix


@pytest.mark.parametrize(("skew", "state"), [(2, "ok"), (-120, "warning"), (1000, "problem")])
def test_the_clocks_of_both(skew, state):
    now = int(time.time())
    assert told(assess_store_clock([formatdate(now + skew, usegmt=True)], now))[0][0] == state


def test_a_store_that_does_not_tell_its_time():
    assert told(assess_store_clock([], time.time()))[0][0] == "not here"


def test_without_the_client_library_the_command_says_so_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UserError, match=r"--s3 s3://doctor: boto3 is not installed"):
        examine_store("s3://doctor")


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
