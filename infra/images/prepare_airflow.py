"""Makes what Airflow needs once before its parts start: tables, a user and the pool of GPU jobs.

Each is left as it is where it is there already. The commands are Airflow's own, all in this one
process, because each process with Airflow in it costs seconds to start.
"""

import os
import sys
from pathlib import Path

from tenacity import RetryCallState, retry, stop_after_attempt, wait_fixed

BETWEEN_S = 5.0


def airflow(*words: str) -> None:
    """Do what the command `airflow WORDS` does."""
    from airflow.cli.cli_parser import get_parser  # it takes seconds

    arguments = get_parser().parse_args(words)
    arguments.func(arguments)


def told(state: RetryCallState) -> None:
    """Say why all the steps are done again."""
    failure = state.outcome.exception() if state.outcome else None
    sys.stderr.write(f"prepare_airflow: {failure!r}; all the steps again in {BETWEEN_S:.0f} s\n")


# A name server may be silent at any of the steps, and Compose starts what runs once only once.
@retry(stop=stop_after_attempt(5), wait=wait_fixed(BETWEEN_S), before_sleep=told, reraise=True)
def prepare() -> None:
    """Do all the steps.

    Raises:
        Exception: What a step raised the last time.
    """
    # A database that starts is waited for.
    airflow("db", "check", "--retry", "30", "--retry-delay", "2")
    airflow("db", "migrate")
    user = os.environ.get("PENSTOCK_AIRFLOW_USER", "admin")
    password = (Path(os.environ["PENSTOCK_SECRETS"]) / "airflow-password").read_text().strip()
    # No other process sees the password: these words are no command line.
    airflow(
        *("users", "create", "--username", user, "--password", password, "--role", "Admin"),
        *("--firstname", "Penstock", "--lastname", "Admin", "--email", f"{user}@localhost"),
    )
    try:
        airflow("pools", "get", "gpu_jobs")
    except SystemExit:
        jobs = os.environ.get("PENSTOCK_GPU_JOBS", "1")
        airflow("pools", "set", "gpu_jobs", jobs, "GPU jobs", "--include-deferred")


if __name__ == "__main__":
    prepare()
