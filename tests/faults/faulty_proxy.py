"""Between a client and its object store: the first request of each kind goes wrong."""

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from tests.background_server import in_background

Fault = Literal["none", "500", "timeout", "reset", "truncated", "slow", "stale"]

Answer = tuple[int, dict[str, str], bytes]  # status, headers, body
_SILENCE_S = 25.0  # longer than any client waits
_SLOW_S, _SLOW_CHUNK, _CHUNKS_A_SECOND = 5.0, 256, 4  # 1 KB/s, for a while
_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive"}


class FaultyProxy(ThreadingHTTPServer):
    """Forwards to a port on this machine.

    Attributes:
        hurt: How many requests went wrong, by method and folder.
    """

    daemon_threads = True

    def __init__(self, port: int, fault: Fault) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = port
        self.fault = fault
        self.hurt: Counter[tuple[str, str]] = Counter()
        self.lists: dict[str, Answer] = {}  # what the store last said of what it has, by path
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Its own address."""
        return f"http://127.0.0.1:{self.server_port}"

    def fault_of(self, method: str, path: str) -> Fault:
        """What befalls the next request."""
        folders = path.partition("?")[0].strip("/").split("/")[:-1]
        kind = method, "/".join(folders[:2])  # the bucket, and the first folder in it
        if self.fault == "stale":
            kind = "LIST", path
            if path not in self.lists:
                return "none"
        with self._lock:
            if self.fault == "none" or self.hurt[kind]:
                return "none"
            self.hurt[kind] += 1
            return self.fault

    def handle_error(self, *_: object) -> None:
        """A client that hung up is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        match self.server.fault_of(self.command, self.path):
            case "500":
                self._answer(500, {}, b"<Error><Code>InternalError</Code></Error>")
            case "timeout":
                time.sleep(_SILENCE_S)
                self.close_connection = True
            case "reset":
                self._reset()
            case "truncated":
                status, headers, content = self._forward(body)
                self._answer(status, headers, content[: len(content) // 2])
                self._reset()
            case "slow":
                self._answer(*self._forward(body), slowly=True)
            case "stale":
                self._answer(*self.server.lists[self.path])
            case _:
                answer = self._forward(body)
                if self.command == "GET" and "list-type=" in self.path:
                    self.server.lists[self.path] = answer
                self._answer(*answer)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _forward(self, body: bytes) -> Answer:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.server.target)) as to:
            to.request(self.command, self.path, body, dict(self.headers))
            answer = to.getresponse()
            content = answer.read()
            headers = {k: v for k, v in answer.getheaders() if k.lower() not in _HOP_BY_HOP}
            return answer.status, headers, content

    def _answer(
        self, status: int, headers: dict[str, str], content: bytes, *, slowly: bool = False
    ) -> None:
        self.send_response_only(status)
        if not any(name.lower() == "content-length" for name in headers):
            headers["Content-Length"] = str(len(content))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        until = time.monotonic() + _SLOW_S if slowly else 0
        while content and time.monotonic() < until:
            self.wfile.write(content[:_SLOW_CHUNK])
            content = content[_SLOW_CHUNK:]
            time.sleep(1 / _CHUNKS_A_SECOND)
        self.wfile.write(content)

    def _reset(self) -> None:
        """The connection ends with a TCP reset."""
        self.wfile.flush()
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def faulty_proxy(port: int, fault: Fault) -> AbstractContextManager[FaultyProxy]:
    """A proxy to the server at the port, while in the block."""
    return in_background(FaultyProxy(port, fault))
