"""A bucket of a real S3 API on loopback: moto's server, or the store that the environment names."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

# The store that `make test-infra` runs these tests against, too, with AWS's own variables for keys.
STORE = "PENSTOCK_TEST_S3"
NEEDS_MOTO = pytest.mark.skipif(STORE in os.environ, reason="rests on what only moto does")


@contextmanager
def s3_bucket(name: str, secret: str = "test") -> Iterator[Any]:
    """A new bucket, as boto3 gives it, with the server's `port`; the environment leads there."""
    if url := os.environ.get(STORE):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", url)
            yield from _bucket(name, url)
        return
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    # It keeps clients by what it was told itself, and not by where the environment leads.
    if repository := sys.modules.get("mlflow.store.artifact.s3_artifact_repo"):
        repository._cached_get_s3_client.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield from _bucket(name, f"http://{host}:{port}")
    server.stop()


def _bucket(name: str, url: str) -> Iterator[Any]:
    import boto3

    bucket = boto3.resource("s3").create_bucket(Bucket=name)
    bucket.port = urlsplit(url).port
    yield bucket
    for upload in bucket.multipart_uploads.all():
        upload.abort()
    bucket.objects.delete()
    bucket.delete()
