"""Ray's Jobs API in memory: what becomes of a job is the test's to say, an outage included."""

import json
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any


class FakeRay:
    """A server on a free port.

    Attributes:
        jobs: What it says of each job, by submission id.
        submitted: The body of each accepted submission, in order.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.submitted: list[dict[str, Any]] = []
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Answer, on the same port again after `stop`."""
        ray = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.rpartition("/")[2]
                known = ray.jobs.get(name) if name else [*ray.jobs.values()]
                self._answer(404 if known is None else 200, known)

            def do_PUT(self) -> None:  # a package of code
                self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(200, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
                if self.path.endswith("/stop"):
                    ray.end(self.path.split("/")[-2], "STOPPED")
                elif (name := body["submission_id"]) in ray.jobs:
                    self._answer(400, f"Job with submission_id {name} already exists")
                    return
                else:
                    ray.submitted.append(body)
                    said = {"status": "RUNNING", "metadata": body["metadata"]}
                    ray.jobs[name] = {"submission_id": name, **said}
                self._answer(200, {})

            def _answer(self, status: int, body: Any) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        """Refuse connections."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def end(self, submission_id: str, status: str, **said: Any) -> None:
        """A job is over."""
        if self.jobs[submission_id]["status"] == "RUNNING":
            self.jobs[submission_id] |= {"status": status, **said}


KILLED = {"error_type": "JOB_ENTRYPOINT_COMMAND_ERROR", "driver_exit_code": -9}


def task_instance(tried: int, max_tries: int) -> SimpleNamespace:
    """What an operator reads of the task that Airflow has it work on."""
    return SimpleNamespace(
        dag_id="dag",
        run_id="run",
        task_id="train",
        map_index=-1,
        try_number=tried,
        max_tries=max_tries,
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        xcom_push=lambda **_: None,
    )
