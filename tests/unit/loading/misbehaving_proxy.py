"""An HTTP proxy in front of a good S3 server, which spoils answers as it is told to."""

import http.client
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STALL_SECONDS = 3.0
FAULTS = ("500", "503", "reset", "truncated", "short", "stalled", "garbled", "other range")


class MisbehavingProxy:
    """Forwards to `port`; `fault(path, number)` names what goes wrong with the n-th GET of it."""

    def __init__(self, port: int) -> None:
        self.upstream = port
        self.fault: Callable[[str, int], str | None] = lambda _path, _number: None
        self.gets: dict[str, int] = {}
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()

    def fault_of(self, path: str) -> str | None:
        with self._lock:
            number = self.gets.get(path, 0)
            self.gets[path] = number + 1
        return self.fault(path, number)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: MisbehavingProxy

    def do_HEAD(self) -> None:
        self._send(*self._upstream())

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        fault = self.proxy.fault_of(path)
        if fault in ("500", "503"):
            self._send(int(fault), {"Content-Length": "0"}, b"")
        elif fault == "reset":
            self.close_connection = True
        else:
            self._send(*self._spoiled(fault, *self._upstream()), stop=fault == "truncated")

    def log_message(self, *_: Any) -> None:
        pass

    def _upstream(self) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.upstream)
        connection.request(self.command, self.path, headers=dict(self.headers))
        answer = connection.getresponse()
        body = answer.read()
        headers = {key: value for key, value in answer.getheaders() if key not in ("Connection",)}
        connection.close()
        return answer.status, headers, body

    def _spoiled(
        self, fault: str | None, status: int, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if fault == "truncated":  # and the connection closed
            body = body[: len(body) // 2]
        elif fault == "short":  # and said so, as if it were all
            body = body[: len(body) // 2]
            headers["Content-Length"] = str(len(body))
        elif fault == "stalled":
            time.sleep(STALL_SECONDS)
        elif fault == "garbled":
            body = bytes([body[0] ^ 1]) + body[1:]
        elif fault == "other range":
            first, _, rest = headers["Content-Range"].partition("-")
            headers["Content-Range"] = f"{first}1-{rest}"
        return status, headers, body

    def _send(self, status: int, headers: dict[str, str], body: bytes, stop: bool = False) -> None:
        try:
            self.send_response_only(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            self.close_connection = stop
        except OSError:  # the client gave up
            self.close_connection = True
