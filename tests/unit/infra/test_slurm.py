"""The sbatch script under a stub of Slurm: two nodes that are processes of this machine.

`ray` is a stub as well: it notes how it was called, and asks the real guard whether it would start.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.core.settings import PROJECT

SLURM = PROJECT / "infra" / "slurm"
COMMAND = ["python", "-m", "ray_jobs.train", "--recipe", "a name"]
STUBS = {
    "scontrol": 'printf "%s\\n" $3 | tr , "\\n"',
    "srun": """
        for node in ${SLURM_JOB_NODELIST//,/ }; do
            SLURMD_NODENAME=$node bash -c '
                # Each node has a /tmp of its own; here they share one.
                folder=penstock-$SLURM_JOB_ID own=$folder-$SLURMD_NODENAME
                [ "$SLURMD_NODENAME" != "$PENSTOCK_RAY_HEAD" ] || own=$folder
                for variable in RAY_TLS_SERVER_CERT RAY_TLS_SERVER_KEY RAY_TLS_CA_CERT; do
                    export $variable="${!variable/$folder/$own}"
                done
                exec "$0"' "${@: -1}" &
        done
        trap 'kill $(jobs -p); wait' TERM
        for node in ${SLURM_JOB_NODELIST//,/ }; do
            wait -n || { kill $(jobs -p) 2>/dev/null; wait; exit 1; }
        done""",
    "ray": """
        printf '%s\\n' "$*" >>"$NOTES/ray"
        case $1 in
        start)
            [ -z "$BROKEN" ] || exit 1
            address=$(printf '%s\\n' "$@" | sed -n 's/--node-ip-address=//p')
            python -c 'import sys; from pipelines.services.ray_start import check_node
check_node("10.0.0.1", "127.0.0.1")' || exit 1
            openssl verify -CAfile "$RAY_TLS_CA_CERT" "$RAY_TLS_SERVER_CERT" >>"$NOTES/verified"
            cp "$RAY_AUTH_TOKEN_PATH" "$NOTES/token"
            stat -c %a "$RAY_AUTH_TOKEN_PATH" "$RAY_CA" "$RAY_TLS_SERVER_KEY" >>"$NOTES/modes"
            echo $$ >>"$NOTES/started"
            echo "Ray runtime started."
            exec sleep 60 ;;
        job)
            sed 's/^/known: /' "$NOTES/started" >>"$NOTES/ray"
            [ -z "$ENDLESS" ] || sleep 60
            exit "$JOB_EXIT" ;;
        esac""",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    stubs = tmp_path / "project" / ".venv" / "bin"
    stubs.mkdir(parents=True)
    for name, text in STUBS.items():
        (stubs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (stubs / name).chmod(0o755)
    (stubs / "python").symlink_to(sys.executable)
    (tmp_path / "project" / "infra").symlink_to(PROJECT / "infra")
    (tmp_path / "notes").mkdir()
    return {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "PYTHONPATH": str(PROJECT),
        "NOTES": str(tmp_path / "notes"),
        "BROKEN": "",
        "JOB_EXIT": "0",
        "ENDLESS": "",
        "PENSTOCK_HOME": str(tmp_path / "home"),
        "SLURM_SUBMIT_DIR": str(tmp_path / "project"),
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "node-0,node-1",
        "SLURM_CPUS_ON_NODE": "64",
        "SLURM_GPUS_ON_NODE": "8",
    }


def test_a_node_takes_an_address_that_others_reach(
    environment: dict[str, str], tmp_path: Path
) -> None:
    hostname = tmp_path / "project" / ".venv" / "bin" / "hostname"
    hostname.write_text("#!/bin/sh\n[ $1 = -i ] && echo fe80::1 127.0.1.1 || echo 10.0.0.7 ::1\n")
    hostname.chmod(0o755)
    assert submit(environment).returncode == 0
    assert "--node-ip-address=10.0.0.7 " in (tmp_path / "notes" / "ray").read_text()


def test_an_interface_may_be_named(environment: dict[str, str], tmp_path: Path) -> None:
    assert submit(environment | {"PENSTOCK_RAY_INTERFACE": "lo"}).returncode == 0
    assert "--node-ip-address=127.0.0.1 " in (tmp_path / "notes" / "ray").read_text()


def test_an_interface_that_there_is_not_is_told(environment: dict[str, str]) -> None:
    ended = submit(environment | {"PENSTOCK_RAY_INTERFACE": "nowhere"})
    assert ended.returncode == 1
    assert " has no IPv4 address: name an interface in PENSTOCK_RAY_INTERFACE" in ended.stderr


def submit(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SLURM / "penstock.sbatch"), *COMMAND]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def cancel_when_it_runs(environment: dict[str, str], calls: Path) -> None:
    """As scancel does: it signals each process of the job."""
    command = ["bash", str(SLURM / "penstock.sbatch"), *COMMAND]
    job = subprocess.Popen(command, env=environment, start_new_session=True)
    deadline = time.monotonic() + 60
    while not calls.exists() or "known: " not in calls.read_text():
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.1)
    os.killpg(job.pid, signal.SIGTERM)
    assert job.wait(30) != 0


def test_a_cluster_of_all_nodes_runs_the_command(
    environment: dict[str, str], tmp_path: Path
) -> None:
    ended = submit(environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    notes = tmp_path / "notes"
    calls = (notes / "ray").read_text()
    head, worker = sorted(line for line in calls.splitlines() if line.startswith("start"))[::-1]
    if "--head" not in head:
        head, worker = worker, head
    for option in ("--head", "--port=6379", "--dashboard-host=127.0.0.1", "--num-gpus=8"):
        assert option in head.split()
    assert "--address=node-0:6379" in worker.split()
    assert f"job submit --working-dir . -- {' '.join(COMMAND)}\nknown: " in calls
    assert calls.count("known: ") == 2  # a job that comes before its nodes finds nobody to take it
    assert (notes / "verified").read_text().count("OK") == 2
    assert set((notes / "modes").read_text().split()) == {"600", "700"}
    assert (notes / "token").read_text().strip() not in calls


def test_one_that_is_requeued_waits_for_its_own_nodes(
    environment: dict[str, str], tmp_path: Path
) -> None:
    left = tmp_path / "home" / "slurm" / "42"  # by a first node that died
    left.mkdir(parents=True)
    for node in ("node-0", "node-1"):
        (left / f"up-{node}").touch()
    assert submit(environment).returncode == 0
    assert (tmp_path / "notes" / "ray").read_text().count("known: ") == 2


@pytest.mark.parametrize("cancelled", [False, True])
def test_nothing_of_it_is_left(
    cancelled: bool, environment: dict[str, str], tmp_path: Path
) -> None:
    if cancelled:
        cancel_when_it_runs(environment | {"ENDLESS": "1"}, tmp_path / "notes" / "ray")
    else:
        submit(environment)
    assert not (tmp_path / "home" / "slurm" / "42").exists()
    assert not list(Path("/tmp").glob("penstock-42-*"))
    for pid in (tmp_path / "notes" / "started").read_text().split():
        assert not Path(f"/proc/{pid}").exists()


def test_the_exit_code_is_the_commands(environment: dict[str, str]) -> None:
    assert submit(environment | {"JOB_EXIT": "3"}).returncode == 3


def test_a_node_that_fails_ends_the_job_with_one_line(environment: dict[str, str]) -> None:
    ended = submit(environment | {"BROKEN": "1"})
    assert (ended.returncode, ended.stderr) == (1, "error: a Ray node did not start\n")
