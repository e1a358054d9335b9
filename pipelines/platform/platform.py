"""`penstock up`, `down` and `status`: the local Airflow, Ray and MLflow as one platform.

The home holds lasting state. A runtime folder in the system's temporary folder holds the sockets
and Ray's session; `services/runtime` holds its path while a platform is started.
"""

import logging
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.product import code_digest
from pipelines.core.settings import PORTS_FILE, Settings
from pipelines.core.storage import one_at_a_time, read_json, write_json, write_text
from pipelines.platform.airflow_config import airflow_database, write_airflow_config
from pipelines.platform.environment import BIN, platform_environment, server_variables
from pipelines.platform.home_versions import take_over
from pipelines.platform.parts import AIRFLOW, NAMES, PARTS, Part, reconciled_path
from pipelines.platform.preflight import check_ports, make_runtime_folder
from pipelines.platform.secrets import ensure_secrets
from pipelines.platform.supervisor import (
    SUPERVISOR_LOG,
    Process,
    Supervisor,
    end_processes,
    processes_of,
    start_supervisord,
    wait_for_end,
)

START_LIMIT_S = 480.0  # on a slow machine that does other work, too
_POLL_S = 0.25
_SILENT_S = 60.0  # another machine sees after seconds what the reconciler does every four
_IMPORTERS = ("dag-processor", "triggerer", "reconciler")  # programs that have imported our code


_log = logging.getLogger(__name__)


class PartFailedError(Exception):
    """A part did not start; the message names the part, its log and the fix, on one line."""


@dataclass(frozen=True)
class PartStatus:
    """The state of one part, for users."""

    name: str
    state: str  # ready, starting, down, or supervisord's word for a failure
    pid: int | None
    url: str | None
    log: str


def up(settings: Settings, on_ready: Callable[[str, float], None]) -> None:
    """Start every part that is not up, and wait until all answer.

    Calls `on_ready(part, seconds)` when a part answers.

    Raises:
        UserError: A port is in use, the platform is up on other ports, or a later version has used
            the home.
        PartFailedError: A part ended or did not answer in time.
    """
    began = time.monotonic()
    with one_at_a_time(_lock(settings)):
        supervisor = _running_supervisor(settings)
        if supervisor is None:
            supervisor = _start(settings)
        else:
            _check_same_ports(settings)
        _start_stopped(settings, supervisor)
        _restart_for_new_code(settings, supervisor)
        _wait_until_ready(
            settings, supervisor, lambda name: on_ready(name, time.monotonic() - began)
        )
        from pipelines.platform.airflow_api import ensure_pool  # imports httpx

        ensure_pool(settings)


def down(settings: Settings) -> bool:
    """Stop only what `up` started; return False if there was nothing to stop."""
    with one_at_a_time(_lock(settings)):
        runtime = runtime_folder(settings)  # read after an earlier `up` or `down` has ended
        if runtime is None:
            return False
        _check_machine(settings)
        _end(settings, runtime)
        return True


def status(settings: Settings) -> list[PartStatus]:
    """Return the status of every part, whether or not the platform is up."""
    supervisor = _running_supervisor(settings)
    processes = supervisor.processes() if supervisor else {}
    return [_part_status(settings, part, processes.get(part.name)) for part in PARTS]


def log_path(settings: Settings, part: str) -> Path:
    """Return the path of a part's log.

    Raises:
        UserError: There is no such part.
    """
    if part not in (*NAMES, "supervisord"):
        raise UserError(f"there is no part {part!r}; the parts are {', '.join(NAMES)}")
    return settings.home / "services" / f"{part}.log"


def _check_same_ports(settings: Settings) -> None:
    given: dict[str, int] = read_json(settings.home / PORTS_FILE)
    for variable, port in settings.ports.items():
        if given[variable] != port:
            raise UserError(
                f"{variable} is {port}, but the platform is up on {given[variable]}; "
                "unset it, or run `penstock down` first"
            )


def _start(settings: Settings) -> Supervisor:
    leftover = runtime_folder(settings)  # of a platform whose supervisord was killed
    if leftover is not None:
        _check_machine(settings)
        _end(settings, leftover)
    check_ports(settings)
    take_over(settings.home)
    ensure_secrets(settings)
    write_airflow_config(settings)
    services = settings.home / "services"
    for folder in (services, settings.home / "mlflow", settings.runs):
        folder.mkdir(parents=True, exist_ok=True)
    runtime = make_runtime_folder()
    write_text(_runtime_file(settings), str(runtime))
    write_text(_host_file(settings), socket.gethostname())
    write_json(settings.home / PORTS_FILE, settings.ports)
    environment = platform_environment(settings) | server_variables(settings, runtime)
    start_supervisord(environment, services)
    supervisor = Supervisor(runtime)
    _wait_for(supervisor.is_running, "supervisord", log_path(settings, "supervisord"))
    return supervisor


def _start_stopped(settings: Settings, supervisor: Supervisor) -> None:
    stopped = [p.name for p in supervisor.processes().values() if p.stopped]
    for name in stopped:
        if name not in AIRFLOW:
            supervisor.start(name)
    # The migration keeps one core busy while Ray and MLflow start on the other.
    if any(name in AIRFLOW for name in stopped):
        _migrate_airflow(settings)
    for name in stopped:
        if name in AIRFLOW:
            supervisor.start(name)


def _migrate_airflow(settings: Settings) -> None:
    """Create or upgrade Airflow's database, once per version of Airflow and database."""
    stamp = settings.home / "airflow" / "migrated"
    current = f"{version('apache-airflow-core')} {airflow_database(settings)}"
    if stamp.exists() and stamp.read_text() == current:
        return
    log = settings.home / "services" / "airflow-migration.log"
    with log.open("w") as file:
        result = subprocess.run(
            [BIN / "airflow", "db", "migrate"],
            env=platform_environment(settings),
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if result.returncode:
        code = result.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else "failed"
        raise PartFailedError(
            f"the migration of Airflow's database {how}; see {log}, fix it, then run `penstock up`"
        )
    write_text(stamp, current)


def _restart_for_new_code(settings: Settings, supervisor: Supervisor) -> None:
    stamp = settings.home / "services" / "imported-code"
    code = code_digest()
    if stamp.exists() and stamp.read_text() != code:
        for process in supervisor.processes().values():
            if process.name in _IMPORTERS and process.state == "RUNNING":
                supervisor.restart(process.name)
    write_text(stamp, code)


def _wait_until_ready(
    settings: Settings, supervisor: Supervisor, on_ready: Callable[[str], None]
) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    pids: dict[str, set[int]] = {part.name: set() for part in PARTS}
    ready: dict[str, int] = {}  # the pid that answered, by part
    while True:
        processes = supervisor.processes()
        for name, process in processes.items():
            # supervisord restarts a part that ended: a busy machine may end it once, but not twice.
            pids[name] |= {process.pid} - {0}
            if process.state in {"FATAL", "STOPPED"} or len(pids[name]) > 2:
                raise _failure(settings, name, f"{_end_of(settings, name)} while starting")
        waiting = [part for part in PARTS if ready.get(part.name) != processes[part.name].pid]
        if not waiting:
            return
        for part in waiting:
            if part.answers(settings, processes[part.name]):
                ready[part.name] = processes[part.name].pid
                on_ready(part.name)
        if time.monotonic() > deadline:
            raise _failure(settings, waiting[0].name, f"did not answer in {START_LIMIT_S:.0f} s")
        time.sleep(0 if len(ready) == len(PARTS) else _POLL_S)


def _failure(settings: Settings, name: str, what: str) -> PartFailedError:
    return PartFailedError(
        f"{name} {what}: the reason is at the end of {log_path(settings, name)}; "
        "fix it and run `penstock up` again (`penstock down` stops the other parts)"
    )


def _end_of(settings: Settings, name: str) -> str:
    """Return how a part ended last: an end by a signal leaves no line in the part's own log."""
    log = settings.home / "services" / SUPERVISOR_LOG
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    ends = re.findall(rf"exited: {re.escape(name)} \((?:terminated by (SIG\w+))?", text)
    return f"was ended by {ends[-1]}" if ends and ends[-1] else "ended"


def _end(settings: Settings, runtime: Path) -> None:
    supervisor = Supervisor(runtime)
    # List them first: a grandchild that outlives its parent cannot be found by parentage.
    ours = processes_of(runtime)
    if supervisor.is_running():
        wait_for_end(supervisor.shut_down())
    end_processes(ours | processes_of(runtime))
    if runtime.exists():  # a restart of the machine empties the temporary folder
        shutil.rmtree(runtime)
    (settings.home / PORTS_FILE).unlink(missing_ok=True)
    _runtime_file(settings).unlink(missing_ok=True)


def _check_machine(settings: Settings) -> None:
    """Check that no platform of another machine, which shares this storage, lives in the home.

    No clocks are compared: a platform that lives touches a file.

    Raises:
        UserError: One does.
    """
    file, touched = _host_file(settings), reconciled_path(settings)
    host = file.read_text(encoding="utf-8") if file.is_file() else socket.gethostname()
    if host == socket.gethostname() or not touched.is_file():
        return
    _log.warning(
        "%s was last used on %s: looking for %.0f s whether its platform is up there",
        settings.home, host, _SILENT_S,
    )  # fmt: skip
    before, deadline = touched.stat().st_mtime_ns, time.monotonic() + _SILENT_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        if touched.stat().st_mtime_ns != before:
            raise UserError(
                f"{settings.home} belongs to the platform that is up on {host}; run "
                "`penstock down` there first, or set PENSTOCK_HOME to a folder of its own"
            )


def _running_supervisor(settings: Settings) -> Supervisor | None:
    runtime = runtime_folder(settings)
    if runtime is None:
        return None
    supervisor = Supervisor(runtime)
    return supervisor if supervisor.is_running() else None


def runtime_folder(settings: Settings) -> Path | None:
    """Return the folder of the platform's sockets, or None if no platform was started."""
    try:
        return Path(_runtime_file(settings).read_text())
    except FileNotFoundError:
        return None


def _runtime_file(settings: Settings) -> Path:
    return settings.home / "services" / "runtime"


def _part_status(settings: Settings, part: Part, process: Process | None) -> PartStatus:
    if process is None:
        state = "down"
    elif process.state in {"STARTING", "RUNNING"}:
        state = "ready" if part.answers(settings, process) else "starting"
    else:
        state = process.state.lower()
    pid = process.pid if process and process.pid else None
    return PartStatus(part.name, state, pid, part.url(settings), str(log_path(settings, part.name)))


def _host_file(settings: Settings) -> Path:
    return settings.home / "services" / "host"


def _wait_for(condition: Callable[[], bool], what: str, log: Path) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            raise PartFailedError(f"{what} did not start; see {log}")
        time.sleep(0.05)


def _lock(settings: Settings) -> Path:
    """Return the lock file that makes a second `up` or `down` wait for the first."""
    return settings.home / "lock"
