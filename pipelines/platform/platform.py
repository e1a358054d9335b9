"""`penstock up`, `down` and `status`: the local Airflow, Ray and MLflow as one thing.

State that lasts lies in the home. Sockets and Ray's session lie in a runtime folder under the
system's temporary folder; its path, kept in `services/runtime`, says that a platform was started.
"""

import hashlib
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.settings import PORTS_FILE, PROJECT, Settings
from pipelines.core.storage import one_at_a_time, read_json, write_json, write_text
from pipelines.platform.airflow_config import airflow_database, write_airflow_config
from pipelines.platform.environment import BIN, platform_environment, server_variables
from pipelines.platform.parts import AIRFLOW, NAMES, PARTS, Part
from pipelines.platform.preflight import check_ports, make_runtime_folder
from pipelines.platform.secrets import ensure_secrets
from pipelines.platform.supervisor import (
    Process,
    Supervisor,
    end_processes,
    processes_of,
    start_supervisord,
    wait_for_end,
)

START_LIMIT_S = 180.0
_POLL_S = 0.25
_IMPORTERS = ("dag-processor", "triggerer", "reconciler")  # programs that keep our code imported
_IMPORTED = ("pipelines/**/*.py", "dags/*.py")


class PartFailedError(Exception):
    """A part did not come up: which one, its log and what to do, on one line."""


@dataclass(frozen=True)
class PartStatus:
    """One part as a user wants to know it."""

    name: str
    state: str  # ready, starting, or supervisord's word for what is wrong
    pid: int | None
    url: str | None
    log: str


def up(settings: Settings, on_ready: Callable[[str, float], None]) -> None:
    """Bring every part up and wait until it answers; cheap when all is well already.

    Calls `on_ready(part, seconds)` as each part answers.

    Raises:
        UserError: a port is in use, or the platform is up on other ports.
        PartFailedError: a part ended or did not answer in time.
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
    """End what `up` started, and only that; False when there was nothing to end."""
    with one_at_a_time(_lock(settings)):
        runtime = runtime_folder(settings)  # what an `up` or `down` that we waited for has left
        if runtime is None:
            return False
        _end(settings, runtime)
        return True


def status(settings: Settings) -> list[PartStatus]:
    """Every part, whether or not the platform is up."""
    supervisor = _running_supervisor(settings)
    processes = supervisor.processes() if supervisor else {}
    return [_part_status(settings, part, processes.get(part.name)) for part in PARTS]


def log_path(settings: Settings, part: str) -> Path:
    """The file with all that a part printed.

    Raises:
        UserError: no such part.
    """
    if part not in (*NAMES, "supervisord"):
        raise UserError(f"no part is named {part!r}; the parts are {', '.join(NAMES)}")
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
        _end(settings, leftover)
    check_ports(settings)
    ensure_secrets(settings)
    write_airflow_config(settings)
    services = settings.home / "services"
    for folder in (services, settings.home / "mlflow", settings.runs):
        folder.mkdir(parents=True, exist_ok=True)
    runtime = make_runtime_folder()
    write_text(_runtime_file(settings), str(runtime))
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
    """Make or upgrade Airflow's database, once for each version of Airflow and each database."""
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
        raise PartFailedError(
            f"the migration of Airflow's database failed; see {log}, fix it, then `penstock up`"
        )
    write_text(stamp, current)


def _restart_for_new_code(settings: Settings, supervisor: Supervisor) -> None:
    stamp = settings.home / "services" / "imported-code"
    code = code_hash(PROJECT)
    if stamp.exists() and stamp.read_text() != code:
        for process in supervisor.processes().values():
            if process.name in _IMPORTERS and process.state == "RUNNING":
                supervisor.restart(process.name)
    write_text(stamp, code)


def code_hash(project: Path) -> str:
    """A digest of the names and contents of all that a DAG file may import."""
    digest = hashlib.sha256()
    for pattern in _IMPORTED:
        for path in sorted(project.glob(pattern)):
            name = str(path.relative_to(project)).encode()
            digest.update(name + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _wait_until_ready(
    settings: Settings, supervisor: Supervisor, on_ready: Callable[[str], None]
) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    pids: dict[str, set[int]] = {part.name: set() for part in PARTS}
    ready: dict[str, int] = {}  # a part and the pid that answered
    while True:
        processes = supervisor.processes()
        for name, process in processes.items():
            # supervisord starts an ended part again: once may be a busy machine, twice is not.
            pids[name] |= {process.pid} - {0}
            if process.state in {"FATAL", "STOPPED"} or len(pids[name]) > 2:
                raise _failure(settings, name, "ended while starting")
        waiting = [part for part in PARTS if ready.get(part.name) != processes[part.name].pid]
        if not waiting:
            return
        for part in waiting:
            if part.answers(settings, processes[part.name]):
                ready[part.name] = processes[part.name].pid
                on_ready(part.name)
        if time.monotonic() > deadline:
            raise _failure(settings, waiting[0].name, f"gave no answer in {START_LIMIT_S:.0f} s")
        time.sleep(0 if len(ready) == len(PARTS) else _POLL_S)


def _failure(settings: Settings, name: str, what: str) -> PartFailedError:
    return PartFailedError(
        f"{name} {what}: the reason is at the end of {log_path(settings, name)}; "
        "fix it and run `penstock up` again (`penstock down` ends the other parts)"
    )


def _end(settings: Settings, runtime: Path) -> None:
    supervisor = Supervisor(runtime)
    # Noted first: a grandchild that outlives its parent can't be traced back to us by parentage.
    ours = processes_of(runtime)
    if supervisor.is_running():
        wait_for_end(supervisor.shut_down())
    end_processes(ours | processes_of(runtime))
    if runtime.exists():  # a restart of the machine empties the temporary folder
        shutil.rmtree(runtime)
    (settings.home / PORTS_FILE).unlink(missing_ok=True)
    _runtime_file(settings).unlink(missing_ok=True)


def _running_supervisor(settings: Settings) -> Supervisor | None:
    runtime = runtime_folder(settings)
    if runtime is None:
        return None
    supervisor = Supervisor(runtime)
    return supervisor if supervisor.is_running() else None


def runtime_folder(settings: Settings) -> Path | None:
    """Where the sockets of the platform lie, None where none was started."""
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


def _wait_for(condition: Callable[[], bool], what: str, log: Path) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            raise PartFailedError(f"{what} did not start; see {log}")
        time.sleep(0.05)


def _lock(settings: Settings) -> Path:
    """Return the lock by which a second `up` or `down` waits for the first."""
    return settings.home / "lock"
