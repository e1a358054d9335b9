"""The sbatch script under a stub of Slurm: two nodes that are processes of this machine.

`ray` is a stub as well: it notes how it was called, and asks the real guard whether it would start.
A real Slurm runs it in tests/infra/test_slurm.py.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from mlflow import MlflowClient

from pipelines.core.settings import PROJECT
from pipelines.core.storage import write_json
from tests.unit.infra.ray_stub import write_ray

SLURM = PROJECT / "infra" / "slurm"
JOB = str(os.getpid())  # /tmp is shared with whoever else runs these tests
COMMAND = ["train", "--recipe", "a name"]
STUBS = {
    "scontrol": """
        [ "$1" != requeue ] || { echo "$*" >>"$NOTES/slurm"; exit; }
        printf "%s\\n" $3 | tr , "\\n" """,
    "squeue": 'cat "$NOTES/state" 2>/dev/null || echo "$JOB_STATE"',
    # A signal to the step goes to the nodes' scripts and to what they run.
    "scancel": """
        echo "$*" >>"$NOTES/slurm"
        for node in $(cat "$PENSTOCK_HOME/srun-$SLURM_JOB_ID"); do
            kill $(pgrep -P "$node") "$node" || true
        done
        exit "$SCANCEL_EXIT" """,
    "srun": """
        echo "$*" >>"$NOTES/srun"
        mkdir -p "$PENSTOCK_HOME"
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
        jobs -p >"$PENSTOCK_HOME/srun-$SLURM_JOB_ID"
        # As Slurm does when srun is killed by anybody else.
        trap '[ "$(squeue)" = COMPLETING ] || kill -9 $(jobs -p)' TERM
        code=0
        while [ -n "$(jobs -pr)" ]; do wait -n || code=$?; done
        exit $code""",
    "ray": """
        printf '%s\\n' "$*" >>"$NOTES/ray"
        case $1 in
        start)
            own=${RAY_TLS_SERVER_CERT%/*}/ray
            mkdir -p "$own/session_latest/logs" && touch "$own/session_latest/logs/raylet.out"
            [ -z "$BROKEN" ] || exit 1
            echo "$RAY_ADDRESS" >>"$NOTES/addresses"
            address=$(printf '%s\\n' "$@" | sed -n 's/--node-ip-address=//p')
            python -c 'import sys; from pipelines.platform.ray_start import check_node
check_node("10.0.0.1", "127.0.0.1")' || exit 1
            openssl verify -CAfile "$RAY_TLS_CA_CERT" "$RAY_TLS_SERVER_CERT" >>"$NOTES/verified"
            cp "$RAY_AUTH_TOKEN_PATH" "$NOTES/token"
            stat -c %a "$RAY_AUTH_TOKEN_PATH" "$RAY_CA" "$RAY_TLS_SERVER_KEY" >>"$NOTES/modes"
            echo $$ >>"$NOTES/started"
            echo "Ray runtime started."
            exec sleep 60 ;;
        job)
            sed 's/^/known: /' "$NOTES/started" >>"$NOTES/ray"
            while [ "$1" != -- ]; do shift; done
            shift
            [ -z "$BREAKS" ] || { "$@" & sleep 1; exit 1; } # only the log's connection
            "$@" || exit 1 ;; # the command's own code is lost
        esac""",
    "train": """
        printf '%s\\n' "$*" >"$NOTES/train"
        ps -o sid=,pid= -p $$ >"$NOTES/session"
        [ -z "$OPEN" ] || { printf %s "$OPEN" >"$PENSTOCK_OPEN_RUN" && kill -KILL $$; }
        trap '[ -z "$NOTICE_EXIT" ] || exit "$NOTICE_EXIT"' USR1
        [ -z "$BREAKS" ] || { sleep 4; echo done >>"$NOTES/train"; }
        while [ -n "$ENDLESS" ]; do touch "$NOTES/trains"; sleep 0.1; done
        exit "$JOB_EXIT" """,
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    stubs = tmp_path / "project" / ".venv" / "bin"
    stubs.mkdir(parents=True)
    for name, text in STUBS.items():
        (stubs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (stubs / name).chmod(0o755)
    write_ray(stubs / "ray", STUBS["ray"])
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
        "OPEN": "",
        "BREAKS": "",
        "NOTICE_EXIT": "143",
        "JOB_STATE": "RUNNING",
        "SCANCEL_EXIT": "0",
        "PENSTOCK_HOME": str(tmp_path / "home"),
        "SLURM_SUBMIT_DIR": str(tmp_path / "project"),
        "SLURM_JOB_ID": JOB,
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


def start(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A job without end, as it trains."""
    command = ["bash", str(SLURM / "penstock.sbatch"), *COMMAND]
    environment = environment | {"ENDLESS": "1"}
    job = subprocess.Popen(command, env=environment, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (Path(environment["NOTES"]) / "trains").exists():
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.1)
    return job


def nothing_left(environment: dict[str, str]) -> bool:
    """Neither secrets nor a process that was started, nor a folder on a node."""
    assert not (Path(environment["PENSTOCK_HOME"]) / "slurm" / JOB).exists()
    assert not list(Path("/tmp").glob(f"penstock-{JOB}-*"))
    assert not Path(f"/tmp/penstock-{JOB}").exists()
    started = Path(environment["NOTES"]) / "started"
    pids = started.read_text().split() if started.exists() else []
    session = Path(environment["NOTES"]) / "session"
    pids += session.read_text().split()[1:] if session.exists() else []
    deadline = time.monotonic() + 5  # Slurm itself kills what is left when its scripts have ended
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    return True


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
    for option in ("--head", "--dashboard-host=127.0.0.1", "--num-gpus=8"):
        assert option in head.split()
    said = dict(word[2:].split("=", 1) for word in head.split() if "=" in word)
    assert f"--address={said['node-ip-address']}:{said['port']}" in worker.split()
    assert said["port"] != said["dashboard-port"]
    # What looks for a Ray on a node with several finds this one.
    own = f"{said['node-ip-address']}:{said['port']}"
    assert (notes / "addresses").read_text().split() == [own, own]
    assert (notes / "train").read_text() == "--recipe a name\n"
    session, command = (notes / "session").read_text().split()
    assert session == command  # outside of the group that Ray kills
    assert calls.count("known: ") == 2  # a job that comes before its nodes finds nobody to take it
    assert (notes / "verified").read_text().count("OK") == 2
    assert set((notes / "modes").read_text().split()) == {"600", "700"}
    assert (notes / "token").read_text().strip() not in calls
    assert nothing_left(environment)


def test_options_for_srun_are_handed_on(environment: dict[str, str], tmp_path: Path) -> None:
    options = "--container-image=/images/penstock.sqsh --container-workdir=/work"
    assert submit(environment | {"PENSTOCK_SRUN_OPTIONS": options}).returncode == 0
    assert f" {options} infra/slurm/node.sh\n" in (tmp_path / "notes" / "srun").read_text()


def test_one_that_is_requeued_waits_for_its_own_nodes(
    environment: dict[str, str], tmp_path: Path
) -> None:
    left = tmp_path / "home" / "slurm" / JOB  # by a first node that died
    left.mkdir(parents=True)
    for name in ("up-node-0", "up-node-1", "head", "failed"):
        (left / name).write_text("10.0.0.1:1 http://127.0.0.1:2\n")
    assert submit(environment).returncode == 0
    assert (tmp_path / "notes" / "ray").read_text().count("known: ") == 2


def test_scancel_leaves_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    """It signals each process of the job, and says so when it is asked."""
    environment |= {"JOB_STATE": "COMPLETING"}
    job = start(environment)
    command = int((Path(environment["NOTES"]) / "session").read_text().split()[1])
    os.killpg(job.pid, signal.SIGTERM)
    os.kill(command, signal.SIGTERM)  # Slurm signals all of a job's processes
    assert job.wait(30) == 143
    assert nothing_left(environment)
    assert not (tmp_path / "notes" / "slurm").exists()  # which Slurm would refuse by then


def test_nodes_leave_nothing_though_slurm_says_that_it_could_not_signal_them(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The real one says so where one of the nodes has left, and signals the others all the same."""
    slow = tmp_path / "project" / ".venv" / "bin" / "tar"
    slow.write_text(f'#!/bin/sh\nsleep 2\nexec {shutil.which("tar")} "$@"\n')
    slow.chmod(0o755)
    assert submit(environment | {"SCANCEL_EXIT": "225"}).returncode == 0
    assert nothing_left(environment)


def test_a_node_that_is_signalled_several_times_leaves_nothing(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Slurm signals a step's processes more than once; no moment of it may cut the leaving short.

    Each node waits for its head. Of sixty some are hit at the wrong moment, if there is one; what a
    node waits in may end by the signal before the node has its own.
    """
    shared = tmp_path / "home" / "slurm" / JOB
    shared.mkdir(parents=True)
    project = Path(environment["SLURM_SUBMIT_DIR"])
    authority = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=a "
        f"-keyout {shared}/ca.key -out {shared}/ca.crt"
    )
    subprocess.run(authority.split(), check=True, capture_output=True)
    with ExitStack() as stack:
        nodes = []
        for number in range(60):
            own = tmp_path / f"own-{number}"
            paths = {"RAY_CA": shared, "RAY_TLS_SERVER_CERT": own / "tls.crt"}
            paths |= {"RAY_TLS_SERVER_KEY": own / "tls.key", "RAY_TLS_CA_CERT": own / "ca.crt"}
            more = {name: str(path) for name, path in paths.items()}
            more |= {"SLURMD_NODENAME": f"node-{number}", "PENSTOCK_RAY_HEAD": "another"}
            node = subprocess.Popen([SLURM / "node.sh"], env=environment | more, cwd=project)
            stack.callback(node.kill)  # where the test fails
            nodes.append((node, own))
        deadline = time.monotonic() + 60
        while not all((own / "tls.crt").exists() for _, own in nodes):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for number, (node, own) in enumerate(nodes):
            for child in psutil.Process(node.pid).children() if number % 2 else ():
                child.terminate()
                time.sleep(random.uniform(0, 0.001))
            for _ in range(20):
                node.terminate()
                time.sleep(random.uniform(0, 0.0001))
            assert node.wait(30) == 143
            assert not own.exists()


@pytest.mark.parametrize(("ends", "requeued"), [(143, True), (138, False), (0, False)])
def test_near_the_time_limit_only_what_saved_is_started_anew(
    ends: int, requeued: bool, environment: dict[str, str], tmp_path: Path
) -> None:
    job = start(environment | {"NOTICE_EXIT": str(ends)})
    job.terminate()  # as --signal=B:TERM does: the script alone
    assert job.wait(30) == ends
    assert nothing_left(environment)
    asked = (tmp_path / "notes" / "slurm").read_text().splitlines()
    assert asked == [f"--signal=TERM {JOB}.0"] + [f"requeue {JOB}"] * requeued


def test_scancel_after_the_notice_is_the_end(environment: dict[str, str], tmp_path: Path) -> None:
    job = start(environment | {"NOTICE_EXIT": ""})  # still saving
    job.terminate()
    time.sleep(1)
    assert job.poll() is None
    (tmp_path / "notes" / "state").write_text("COMPLETING\n")
    command = int((tmp_path / "notes" / "session").read_text().split()[1])
    os.killpg(job.pid, signal.SIGTERM)
    os.kill(command, signal.SIGTERM)
    assert job.wait(30) == 143
    assert nothing_left(environment)
    assert not (tmp_path / "notes" / "slurm").exists()  # no requeue


def test_rays_logs_outlive_their_node(environment: dict[str, str], tmp_path: Path) -> None:
    assert submit(environment | {"BROKEN": "1"}).returncode == 1
    kept = tmp_path / "home" / "slurm" / "logs" / f"{JOB}.0"
    for node in kept.iterdir():
        with tarfile.open(node) as archive:
            assert "session_latest/logs/raylet.out" in archive.getnames()
    assert {path.name for path in kept.iterdir()} >= {"node-0.tar.gz"}


def test_the_exit_code_is_the_commands(environment: dict[str, str]) -> None:
    assert submit(environment | {"JOB_EXIT": "3"}).returncode == 3


def test_a_command_goes_on_where_only_its_log_is_lost(
    environment: dict[str, str], tmp_path: Path
) -> None:
    assert submit(environment | {"BREAKS": "1", "JOB_EXIT": "3"}).returncode == 3
    assert (tmp_path / "notes" / "train").read_text().endswith("done\n")
    assert nothing_left(environment)


def test_the_notice_is_heard_where_the_controller_is_too_busy_to_say_more(
    environment: dict[str, str], tmp_path: Path
) -> None:
    job = start(environment | {"JOB_STATE": ""})
    job.terminate()
    assert job.wait(30) == 143
    asked = (tmp_path / "notes" / "slurm").read_text().splitlines()
    assert asked[-1] == f"requeue {JOB}"


def test_the_mlflow_run_of_a_command_that_was_killed_is_closed(
    environment: dict[str, str], mlflow_run: str, mlflow_client: MlflowClient, tmp_path: Path
) -> None:
    workspace = tmp_path / "a workspace"
    workspace.mkdir()
    of_it = {"dag_run_id": "1", "git_commit": "", "dirty": False, "recipe_fingerprint": "2"}
    write_json(workspace / "run.json", of_it | {"mlflow_run_id": mlflow_run})
    packages = str(Path(httpx.__file__).parents[1])  # the stub's `.venv` has none
    environment |= {"PYTHONPATH": f"{PROJECT}:{packages}", "OPEN": str(workspace)}
    environment["MLFLOW_TRACKING_URI"] = os.environ["MLFLOW_TRACKING_URI"]
    assert submit(environment).returncode == 137
    assert mlflow_client.get_run(mlflow_run).info.status == "FAILED"
    assert nothing_left(environment)


def test_a_node_that_fails_ends_the_job_with_one_line(environment: dict[str, str]) -> None:
    ended = submit(environment | {"BROKEN": "1"})
    assert ended.returncode == 1
    assert ended.stderr == "error: Ray failed on node-0\n"
    assert nothing_left(environment)
