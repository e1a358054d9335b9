"""The metadata services of three clouds, as their documentation says that they answer."""

import json
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.background_server import in_background

TOKEN = "AQAEAK-a-token"
NAME = "gpu-7"  # Azure's name of this machine


class MetadataService(ThreadingHTTPServer):
    """On the loopback, at `url`; each cloud is told by a different request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.host = f"127.0.0.1:{self.server_port}"
        self.url = f"http://{self.host}"
        self.action: dict[str, str] | None = None  # AWS's
        self.preempted = False  # Google's
        self.events: list[dict[str, object]] = []  # Azure's
        self.looks = 0


class _Answers(BaseHTTPRequestHandler):
    server: MetadataService

    def do_PUT(self) -> None:
        seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        asked = self.path == "/latest/api/token" and seconds.isdigit()
        self._answer(200 if asked else 400, TOKEN)

    def do_GET(self) -> None:
        service, path = self.server, self.path
        service.looks += 1
        if path == "/latest/meta-data/spot/instance-action":
            if self.headers.get("X-aws-ec2-metadata-token") != TOKEN:
                return self._answer(401, "")
            found = service.action is not None
            return self._answer(200 if found else 404, json.dumps(service.action))
        if path == "/computeMetadata/v1/instance/preempted":
            if self.headers.get("Metadata-Flavor") != "Google":
                return self._answer(403, "")
            return self._answer(200, "TRUE" if service.preempted else "FALSE")
        if self.headers.get("Metadata") != "true":
            return self._answer(400, "")
        if path == "/metadata/scheduledevents?api-version=2020-07-01":
            return self._answer(
                200, json.dumps({"DocumentIncarnation": 1, "Events": service.events})
            )
        if path == "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
            return self._answer(200, NAME)
        return self._answer(404, "")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def metadata_service() -> AbstractContextManager[MetadataService]:
    """It answers within the block."""
    return in_background(MetadataService())
