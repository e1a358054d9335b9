"""The client of Ray's Jobs API against a small server of our own: TLS, tokens, what is sent."""

import asyncio
import datetime
import ipaddress
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pipelines.orchestration.jobs_api import JobsApi


class Handler(BaseHTTPRequestHandler):
    """Knows one job and one package, and keeps what it is asked."""

    def do_GET(self):
        if self.path == "/api/jobs/":
            self.answer(200, [{"type": "DRIVER", "status": "RUNNING", "metadata": None}])
        else:
            known = self.path in ("/api/jobs/known", "/api/packages/gcs/known.zip")
            self.answer(200 if known else 404, {"submission_id": "known", "status": "RUNNING"})

    def do_PUT(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, {})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        busy = sum(command == "POST" for command, _, _ in self.server.asked) < 2
        self.answer(*((500, "No available agent to submit job, please") if busy else (200, {})))

    def answer(self, status, body):
        self.server.asked.append((self.command, self.path, self.headers.get("Authorization")))
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    """Plain HTTP; a test may put TLS around its socket before the first request."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.write_text("first\n")
    return path


def call(server, token, method, *arguments, scheme="http"):
    async def one():
        url = f"{scheme}://127.0.0.1:{server.server_port}"
        async with JobsApi(url, token) as jobs:
            return await getattr(jobs, method)(*arguments)

    return asyncio.run(one())


def private_authority(folder):
    """A self-signed certificate for 127.0.0.1, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "our own authority")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path, key_path = folder / "ca.pem", folder / "key.pem"
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path, key_path


def test_https_with_a_private_authority_is_trusted_by_ssl_cert_file(
    server, token, tmp_path, monkeypatch
):
    certificate, key = private_authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)

    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        call(server, token, "get", "known", scheme="https")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert call(server, token, "get", "known", scheme="https").live


def test_the_token_is_read_for_each_request(server, token):
    async def twice():
        async with JobsApi(f"http://127.0.0.1:{server.server_port}", token) as jobs:
            await jobs.get("known")
            token.write_text("second")
            await jobs.get("known")

    asyncio.run(twice())
    assert [asked[2] for asked in server.asked] == ["Bearer first", "Bearer second"]


def test_a_cluster_without_tokens_needs_no_file(server, tmp_path):
    assert call(server, tmp_path / "none", "get", "known").live
    assert server.asked[0][2] is None


def test_an_unknown_job_is_none_and_a_driver_that_nobody_submitted_has_no_id(server, token):
    assert call(server, token, "get", "unknown") is None
    (driver,) = call(server, token, "jobs")
    assert driver.submission_id is None


def test_a_package_that_is_there_is_not_sent_again(server, token):
    assert call(server, token, "upload", "known.zip", b"x") == "gcs://known.zip"
    assert [asked[0] for asked in server.asked] == ["GET"]
    assert call(server, token, "upload", "new.zip", b"x") == "gcs://new.zip"
    assert [asked[0] for asked in server.asked] == ["GET", "GET", "PUT"]


def test_a_head_without_an_agent_is_asked_again(server, tmp_path):
    async def submit():
        async with JobsApi(f"http://127.0.0.1:{server.server_port}", tmp_path / "none") as jobs:
            await jobs.submit("some", "true", {}, {})

    asyncio.run(submit())
    assert [command for command, _, _ in server.asked] == ["POST"] * 3
