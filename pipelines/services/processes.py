"""The platform's processes, known by the runtime folder in their environment."""

from pathlib import Path

import psutil  # type: ignore[import-untyped]

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
