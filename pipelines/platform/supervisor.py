"""The process manager: supervisord, called over its Unix socket in the runtime folder.

The platform's processes are found by the runtime folder in their environment.
"""

import os
import subprocess
import time
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
    """Return every live process that inherited `PENSTOCK_RUNTIME=<runtime>`, under any parent."""
    return {process for process in psutil.process_iter() if _belongs(process, runtime)}


def wait_for_end(pid: int) -> None:
    """Wait until a process that was told to end has ended, or until the time limit."""
    try:
        psutil.Process(pid).wait(_STOP_LIMIT_S)
    except (psutil.NoSuchProcess, psutil.TimeoutExpired):
        return  # `end_processes` kills the processes that are left


def end_processes(processes: set[psutil.Process]) -> None:
    """Kill those of `processes` that are still alive."""
    for process in processes:
        try:
            process.kill()  # psutil checks that the pid is not another process's now
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(list(processes), timeout=_KILL_LIMIT_S)


def _belongs(process: psutil.Process, runtime: Path) -> bool:
    try:
        return bool(process.environ().get("PENSTOCK_RUNTIME") == str(runtime))
    except psutil.Error:
        return False  # another user's process, or an ended one


CONFIG = Path(__file__).with_name("supervisord.conf")
GROUP = "platform"
SOCKET = "supervisor.sock"
SUPERVISOR_LOG = "supervisord.log"  # among the logs of the services

_STOPPED = {"STOPPED", "EXITED", "FATAL", "UNKNOWN"}


@dataclass(frozen=True)
class Process:
    """One program as supervisord sees it."""

    name: str
    state: str  # STOPPED, STARTING, RUNNING, BACKOFF, STOPPING, EXITED, FATAL, UNKNOWN
    pid: int  # 0 when not running
    started: float  # seconds since the epoch, by the clock as it is now; 0 when never started

    @property
    def stopped(self) -> bool:
        """Whether the program does not run until it is started."""
        return self.state in _STOPPED


def start_supervisord(environment: dict[str, str], logs: Path) -> None:
    """Start the daemon in the folder `logs`; its programs inherit `environment`."""
    subprocess.run([BIN / "supervisord", "-c", CONFIG], env=environment, cwd=logs, check=True)


def _started(info: dict[str, Any]) -> float:
    """Return when a program started: by its age, as the clock may have been set since then."""
    try:
        stat = Path(f"/proc/{info['pid']}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it does not run, or this is no Linux
        return float(info["start"])
    ticks = int(stat.rpartition(")")[2].split()[19])  # from the machine's start to the program's
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


class Supervisor:
    """A running supervisord."""

    def __init__(self, runtime: Path):
        self.socket = runtime / SOCKET

    def is_running(self) -> bool:
        """Return whether supervisord answers."""
        try:
            with self._rpc() as rpc:
                rpc.getPID()
        except OSError:
            return False
        return True

    def processes(self) -> dict[str, Process]:
        """Return every program by name."""
        with self._rpc() as rpc:
            infos = rpc.getAllProcessInfo()
        return {
            info["name"]: Process(info["name"], info["statename"], info["pid"], _started(info))
            for info in infos
        }

    def start(self, name: str) -> None:
        """Start a program and return at once."""
        with self._rpc() as rpc:
            rpc.startProcess(f"{GROUP}:{name}", False)

    def restart(self, name: str) -> None:
        """Stop a program, wait for its end and start it again."""
        with self._rpc() as rpc:
            rpc.stopProcess(f"{GROUP}:{name}", True)
        self.start(name)

    def shut_down(self) -> int:
        """Ask supervisord to end its programs and itself; return its pid to wait for."""
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
