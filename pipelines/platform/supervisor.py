"""The process manager: supervisord, spoken to over its Unix socket in the runtime folder.

The platform's processes, known by the runtime folder in their environment.
"""

import subprocess
import xmlrpc.client
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from pipelines.platform.environment import BIN

_STOP_LIMIT_S = 12.0
_KILL_LIMIT_S = 3.0


def processes_of(runtime: Path) -> set[psutil.Process]:
    """Every live process that inherited `PENSTOCK_RUNTIME=<runtime>`, whoever its parent is now."""
    return {process for process in psutil.process_iter() if _belongs(process, runtime)}


def wait_for_end(pid: int) -> None:
    """Wait until a process that was told to end has ended, or time is up."""
    try:
        psutil.Process(pid).wait(_STOP_LIMIT_S)
    except (psutil.NoSuchProcess, psutil.TimeoutExpired):
        return  # what is left is killed by `end_processes`


def end_processes(processes: set[psutil.Process]) -> None:
    """Kill what still lives of `processes`."""
    for process in processes:
        try:
            process.kill()  # checks that the pid was not given to another process meanwhile
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(list(processes), timeout=_KILL_LIMIT_S)


def _belongs(process: psutil.Process, runtime: Path) -> bool:
    try:
        return bool(process.environ().get("PENSTOCK_RUNTIME") == str(runtime))
    except psutil.Error:
        return False  # another user's, or gone by now


CONFIG = Path(__file__).with_name("supervisord.conf")
GROUP = "platform"
SOCKET = "supervisor.sock"

_STOPPED = {"STOPPED", "EXITED", "FATAL", "UNKNOWN"}


@dataclass(frozen=True)
class Process:
    """One program as supervisord sees it."""

    name: str
    state: str  # STOPPED, STARTING, RUNNING, BACKOFF, STOPPING, EXITED, FATAL, UNKNOWN
    pid: int  # 0 when not running
    started: float  # seconds since the epoch; 0 when never started

    @property
    def stopped(self) -> bool:
        """Whether it must be started to run."""
        return self.state in _STOPPED


def start_supervisord(environment: dict[str, str], logs: Path) -> None:
    """Start the daemon in the folder `logs`; its programs inherit `environment`."""
    subprocess.run([BIN / "supervisord", "-c", CONFIG], env=environment, cwd=logs, check=True)


class Supervisor:
    """A running supervisord."""

    def __init__(self, runtime: Path):
        self.socket = runtime / SOCKET

    def is_running(self) -> bool:
        """Whether it answers."""
        try:
            with self._rpc() as rpc:
                rpc.getPID()
        except OSError:
            return False
        return True

    def processes(self) -> dict[str, Process]:
        """Every program by name."""
        with self._rpc() as rpc:
            infos = rpc.getAllProcessInfo()
        return {
            info["name"]: Process(info["name"], info["statename"], info["pid"], info["start"])
            for info in infos
        }

    def start(self, name: str) -> None:
        """Start a program and return at once."""
        with self._rpc() as rpc:
            rpc.startProcess(f"{GROUP}:{name}", False)

    def restart(self, name: str) -> None:
        """Stop a program, wait for its end, and start it."""
        with self._rpc() as rpc:
            rpc.stopProcess(f"{GROUP}:{name}", True)
        self.start(name)

    def shut_down(self) -> int:
        """Ask it to end its programs and itself; returns its pid, to be waited for."""
        with self._rpc() as rpc:
            pid = int(rpc.getPID())
            rpc.shutdown()
        return pid

    @contextmanager
    def _rpc(self) -> Iterator[Any]:
        from supervisor.xmlrpc import SupervisorTransport  # type: ignore[import-untyped]

        transport = SupervisorTransport(None, None, f"unix://{self.socket}")
        with xmlrpc.client.ServerProxy("http://localhost", transport=transport) as proxy:
            yield proxy.supervisor
