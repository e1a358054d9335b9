"""A real tracking server on a port of its own."""

import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from pipelines.core.machine import free_port


class MlflowServer:
    """Its database is in a folder; clients reach its artifacts themselves, as on the platform."""

    def __init__(self, folder: Path, artifacts: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._folder = folder
        self._command = [Path(sys.executable).with_name("mlflow"), "server", "--port", str(port)]
        self._command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
        self._command += ["--no-serve-artifacts", "--default-artifact-root", artifacts]
        self.start()

    def start(self) -> None:
        """Until it answers."""
        with (self._folder / "server.log").open("a") as log:
            self.process = psutil.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline
                time.sleep(0.2)
            else:
                return

    def kill(self) -> None:
        """With all that it started."""
        for process in (*self.process.children(recursive=True), self.process):
            process.kill()
        self.process.wait()
