"""A real Slurm on this machine: one controller, which is also the login node, and nodes of one CPU.

Each is a host with a network, a name, processes, a /tmp and a /dev/shm of its own; everything else,
the project and `shared` among it, they share as the hosts of a cluster share a storage.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pipelines.core.settings import PROJECT
from tests.hosts import Hosts

CONTROLLER = 1  # a host's number; those of the nodes follow
NAMES = ("n1", "n2", "n3")
_SUBNET = "10.79.0"
_CONFIGURATION = """
ClusterName=penstock
SlurmctldHost=login({subnet}.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
JobRequeue=1
ReturnToService=2
SlurmdTimeout=20
KillWait=30
NodeName=n[1-3] NodeAddr={subnet}.[2-4] CPUs=1 RealMemory=4000 Gres=gpu:8 State=UNKNOWN
PartitionName=whole Nodes=ALL Default=YES OverSubscribe=NO MaxTime=INFINITE State=UP
PartitionName=shared Nodes=ALL OverSubscribe=YES:2 MaxTime=INFINITE State=UP
"""
# What a host does before its daemon: Ray makes its sockets and PyTorch its segments in these two.
_HOST = """
hostname "$0"
mount --make-rprivate /
mount --bind "$HOSTS" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o size=2g,mode=1777 tmpfs /dev/shm
"$@" &
wait $!
"""


class SlurmCluster:
    """What runs while `slurm_cluster` is open.

    Attributes:
        shared: A folder that all hosts see.
        environment: Of a user on the login node.
    """

    def __init__(self, folder: Path, hosts: Hosts, stack: ExitStack) -> None:
        self.shared = folder / "shared"
        self._folder = folder
        self._hosts = hosts
        self._stack = stack
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        inherited = {k: v for k, v in os.environ.items() if k in ("HOME", "LANG", "PATH")}
        self.environment = inherited | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PENSTOCK_HOME": str(self.shared / "home"),
            "SBATCH_OUTPUT": str(self.shared / "%j.out"),
            "no_proxy": "*",
        }

    @property
    def address(self) -> str:
        """Of the login node."""
        return self._hosts.address(CONTROLLER)

    def command(self, line: str, **variables: str) -> str:
        """What a line of shell prints on the login node, in the project's folder."""
        done = subprocess.run(
            [*self._enter(CONTROLLER), "bash", "-euc", line],
            cwd=PROJECT,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, line: str, **variables: str) -> str:
        """The id of the job that a line with sbatch submits."""
        return self.command(line, **variables).split()[-1]

    def state(self, job: str) -> dict[str, str]:
        """What Slurm says of a job."""
        words = self.command(f"scontrol --oneliner show job {job}").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def output(self, job: str) -> str:
        """All that a job has printed."""
        path = self.shared / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, true: Callable[[], bool], what: str, job: str, limit_s: float) -> None:
        """Wait, and tell what the job printed where it takes too long."""
        deadline = time.monotonic() + limit_s
        while not true():
            late = time.monotonic() > deadline
            assert not late, f"no {what}: {self.state(job)}\n{self.output(job)[-6000:]}"
            time.sleep(0.5)

    def ended(self, job: str, limit_s: float) -> str:
        """The state that a job ends in, all its nodes free again."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.until(lambda: self.state(job)["JobState"] in over, f"end of {job}", job, limit_s)
        return self.state(job)["JobState"]

    def start_server(self, command: list[str], log: str) -> None:
        """A server on the login node, until all of it ends."""
        with (self._folder / log).open("wb") as file:
            server = subprocess.Popen(
                [*self._enter(CONTROLLER), *command],
                env=self.environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._stack.callback(_end, server)

    def boot(self, name: str) -> None:
        """Start a node."""
        number = CONTROLLER + 1 + NAMES.index(name)
        (self._folder / f"spool.{name}").mkdir(exist_ok=True)
        self._nodes[name] = self._host(number, name, "slurmd", "-D", "-N", name)
        self._stack.callback(self.lose, name)

    def lose(self, name: str) -> None:
        """A node loses its power: it says no more to anybody."""
        number = CONTROLLER + 1 + NAMES.index(name)
        node = self._nodes.pop(name, None)
        if node is not None:
            with self._hosts.cut(number):
                _kill(node)

    def on(self, name: str, line: str) -> str:
        """What a line of shell prints on a node."""
        pid = self._nodes[name].pid
        (inner,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        command = ["nsenter", "--mount", "--pid", f"--target={inner}", "bash", "-c", line]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def left_on(self, name: str) -> list[str]:
        """Processes but the node's own, and files in its temporary folders."""
        lines = self.on(name, "ps -e -o args=; find /tmp /dev/shm -mindepth 1").splitlines()
        own = ("bash -euc", "slurmd ", "ps -e", "bash -c", "find ")
        return [line for line in lines if not line.startswith(own)]

    def start_controller(self) -> None:
        """Start Slurm's controller."""
        self._stack.callback(_kill, self._host(CONTROLLER, "login", "slurmctld", "-D"))

    def _host(self, number: int, name: str, *command: str) -> subprocess.Popen[bytes]:
        new = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        environment = {
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "SLURM_CONF": self.environment["SLURM_CONF"],
            "HOSTS": str(self._folder / "hosts"),
        }
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*self._enter(number), *new, "bash", "-euc", _HOST, name, *command],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _enter(self, number: int) -> list[str]:
        # `ip netns exec` would hide the control groups, which Ray reads.
        return ["nsenter", f"--net=/run/netns/{self._hosts.space(number)}"]


@contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """All hosts up, while in the block."""
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(4, name="penstock-slurm", subnet=_SUBNET))
        # Not in /tmp, which no two nodes share.
        folder = Path(tempfile.mkdtemp(prefix="penstock-slurm-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for name in ("state", "munge", "shared"):
            (folder / name).mkdir()
        (folder / "munge").chmod(0o755)
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, subnet=_SUBNET))
        names = {hosts.address(number): name for number, name in enumerate(("login", *NAMES), 1)}
        lines = "".join(f"{address} {name}\n" for address, name in names.items())
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{lines}")
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        for number in range(8):
            (folder / f"gpu{number}").touch()
        stack.callback(_end, _munge(folder / "munge"))
        cluster = SlurmCluster(folder, hosts, stack)
        cluster.start_controller()
        for name in NAMES:
            cluster.boot(name)
        _wait_for_nodes(cluster, folder)
        yield cluster


def _munge(folder: Path) -> subprocess.Popen[bytes]:
    key = folder / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = ("pid-file", "log-file", "seed-file")
    options = [f"--{file}={folder}/{file}" for file in files]
    command = ["munged", "--foreground", "--force", f"--key-file={key}", *options]
    return subprocess.Popen(
        [*command, f"--socket={folder}/socket"],
        env={"PATH": f"{os.environ['PATH']}:/usr/sbin"},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _wait_for_nodes(cluster: SlurmCluster, folder: Path) -> None:
    deadline = time.monotonic() + 60
    look = "sinfo --noheader --partition=whole --states=idle --format=%D 2>/dev/null || true"
    while cluster.command(look).strip() != str(len(NAMES)):
        logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
        assert time.monotonic() < deadline, logs
        time.sleep(0.5)


def _kill(host: subprocess.Popen[bytes]) -> None:
    """With the first process of its namespace all others go."""
    host.kill()
    host.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
