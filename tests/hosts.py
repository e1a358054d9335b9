"""Hosts with addresses of their own, as network namespaces; their links can be cut.

They share the machine's files, as the hosts of a cluster share a storage.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

_OWN_FILES = Path("/etc/netns")  # what a namespace has in the place of files of /etc


class Hosts:
    """So many hosts on one switch, numbered from 1, while in the block.

    `name` and `subnet` keep two networks apart that exist at the same time.

    Attributes:
        numbers: Of the hosts.
    """

    def __init__(self, number: int, name: str = "penstock", subnet: str = "10.77.0") -> None:
        self.numbers = range(1, number + 1)
        self._name = name
        self._subnet = subnet
        self._switch = f"{name}-switch"

    def __enter__(self) -> "Hosts":
        self._lock = only_run(self._name)
        self._remove()  # what a killed run has left
        done = subprocess.run(["ip", "netns", "add", self._switch], capture_output=True, text=True)
        if done.returncode:
            self._lock.release()
            pytest.skip(f"no network namespaces can be made here: {done.stderr.strip()}")
        try:
            self._connect()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            pytest.skip(f"no hosts can be made here: {error.stderr.decode().strip()}")
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()
        self._lock.release()

    def _remove(self) -> None:
        for host in self.numbers:
            self.kill(host)
        for space in (*map(self.space, self.numbers), self._switch):
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)
            shutil.rmtree(_OWN_FILES / space, ignore_errors=True)

    def kill(self, host: int) -> None:
        """End all processes of a host at once, as a power cut does."""
        for pid in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, host: int) -> list[int]:
        """The ids of a host's processes."""
        command = ["ip", "netns", "pids", self.space(host)]
        pids = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return [int(pid) for pid in pids.split()]

    def space(self, host: int) -> str:
        """The name of a host's network namespace."""
        return f"{self._name}-host{host}"

    def address(self, host: int) -> str:
        """The address of a host on the switch."""
        return f"{self._subnet}.{host}"

    def start(
        self, host: int, command: Sequence[str], environment: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Run a command on a host."""
        with log.open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.space(host), *command],
                env=environment,
                stdout=file,
                stderr=file,
            )

    @contextmanager
    def cut(self, host: int) -> Iterator[None]:
        """Nothing reaches a host in the block, and nothing tells of it."""
        run_ip("-n", self._switch, "link", "set", f"port{host}", "down")
        try:
            yield
        finally:
            run_ip("-n", self._switch, "link", "set", f"port{host}", "up")

    @contextmanager
    def mute(self, host: int) -> Iterator[None]:
        """All that a host sends is lost in the block, and nothing tells of it; it still hears."""
        others = [self.address(each) for each in self.numbers if each != host]
        where = ["dev", "eth0"]
        for address in others:  # to a machine that is not there
            nobody = ["lladdr", "02:00:00:00:00:01", "nud", "permanent"]
            run_ip("-n", self.space(host), "neigh", "replace", address, *nobody, *where)
        try:
            yield
        finally:
            for address in others:
                run_ip("-n", self.space(host), "neigh", "del", address, *where)

    def ask_for_names(self, server: str) -> None:
        """Have what is started from now on ask a name server, of which it waits a second."""
        for host in self.numbers:
            folder = _OWN_FILES / self.space(host)
            folder.mkdir(parents=True, exist_ok=True)
            text = f"nameserver {server}\noptions timeout:1 attempts:1\n"
            (folder / "resolv.conf").write_text(text)

    def _connect(self) -> None:
        run_ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        run_ip("-n", self._switch, "link", "set", "bridge", "up")
        for host in self.numbers:
            space, port = self.space(host), f"port{host}"
            run_ip("netns", "add", space)
            pair = ["type", "veth", "peer", "name", port, "netns", self._switch]
            run_ip("link", "add", "eth0", "netns", space, *pair)
            run_ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            run_ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            run_ip("-n", space, "link", "set", "eth0", "up")
            run_ip("-n", space, "link", "set", "lo", "up")


def only_run(name: str) -> FileLock:
    """The lock of names that a machine has once; skips the test where another run of it has it."""
    lock = FileLock(Path(tempfile.gettempdir()) / f"{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        pytest.skip(f"another run of the tests on this machine has the name {name}")
    return lock


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
