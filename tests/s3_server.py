"""A real S3 API on loopback: moto's server."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def s3_bucket(name: str, secret: str = "test") -> Iterator[Any]:
    """A new bucket, as boto3 gives it, with the server's `port`; the environment leads there."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        bucket = boto3.resource("s3").create_bucket(Bucket=name)
        bucket.port = port
        yield bucket
    server.stop()
