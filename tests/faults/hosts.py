"""Hosts with addresses of their own, as network namespaces; their links can be cut.

They share the machine's files, as the hosts of a cluster share a storage.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_SWITCH = "penstock-switch"
_SUBNET = "10.77.0"


class Hosts:
    """So many hosts on one switch, numbered from 1, while in the block."""

    def __init__(self, number: int) -> None:
        self._numbers = range(1, number + 1)

    def __enter__(self) -> "Hosts":
        done = subprocess.run(["ip", "netns", "add", _SWITCH], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no network namespaces can be made here: {done.stderr.strip()}")
        try:
            self._connect()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            pytest.skip(f"no hosts can be made here: {error.stderr.decode().strip()}")
        return self

    def __exit__(self, *_: object) -> None:
        for space in (*map(_space, self._numbers), _SWITCH):
            pids = subprocess.run(
                ["ip", "netns", "pids", space], capture_output=True, text=True, check=False
            ).stdout.split()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)

    @staticmethod
    def address(host: int) -> str:
        """Of a host, on the switch."""
        return f"{_SUBNET}.{host}"

    @staticmethod
    def start(
        host: int, command: Sequence[str], environment: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Run a command on a host."""
        with log.open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", _space(host), *command],
                env=environment,
                stdout=file,
                stderr=file,
            )

    @contextmanager
    def cut(self, host: int) -> Iterator[None]:
        """Nothing reaches a host in the block, and nothing tells of it."""
        _ip("-n", _SWITCH, "link", "set", f"port{host}", "down")
        try:
            yield
        finally:
            _ip("-n", _SWITCH, "link", "set", f"port{host}", "up")

    def _connect(self) -> None:
        _ip("-n", _SWITCH, "link", "add", "bridge", "type", "bridge")
        _ip("-n", _SWITCH, "link", "set", "bridge", "up")
        for host in self._numbers:
            space, port = _space(host), f"port{host}"
            _ip("netns", "add", space)
            pair = ["type", "veth", "peer", "name", port, "netns", _SWITCH]
            _ip("link", "add", "eth0", "netns", space, *pair)
            _ip("-n", _SWITCH, "link", "set", port, "master", "bridge", "up")
            _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")


def _space(host: int) -> str:
    return f"penstock-host{host}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
