"""Hosts whose links have a rate, a delay and a loss: a switch in a process of its own carries them.

Linux can do this by `tc`, but kernels are often built without netem, which delays and drops. So
each host's interface is a TAP device, whose frames this process reads and hands on.

    python -m tests.slow_network DEVICE... --rate 125e6 --delay 0.001 --loss 0.0001
"""

import argparse
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

from tests.hosts import Hosts, run_ip

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_MTU = 9000
_FRAME = _MTU + 64
_MOST_WAITING_S = 0.2  # a frame that would have to wait longer for its turn is dropped


@dataclass(frozen=True)
class Link:
    """What lies between any two hosts.

    Attributes:
        rate: Bytes a second to each host.
        delay: Seconds on the way.
        loss: The share of frames that never arrive.
    """

    rate: float
    delay: float = 0.0
    loss: float = 0.0


class SlowHosts(Hosts):
    """Hosts on a switch that is as slow as `link`."""

    def __init__(self, number: int, link: Link) -> None:
        super().__init__(number, "slow", "10.78.0")
        self._link = link
        self._carrier: subprocess.Popen[str] | None = None

    def __exit__(self, *_: object) -> None:
        if self._carrier:
            self._carrier.kill()
            self._carrier.wait()
        super().__exit__()

    def _connect(self) -> None:
        devices = {host: f"slow-tap{host}" for host in self.numbers}
        link = [f"--{name}={value}" for name, value in vars(self._link).items()]
        command = [sys.executable, "-m", "tests.slow_network", *devices.values(), *link]
        self._carrier = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._carrier.stdout
        assert self._carrier.stdout.readline() == "ready\n"
        for host, device in devices.items():
            space = self.space(host)
            run_ip("netns", "add", space)
            run_ip("link", "set", device, "netns", space, "name", "eth0", "mtu", str(_MTU))
            run_ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            run_ip("-n", space, "link", "set", "eth0", "up")
            run_ip("-n", space, "link", "set", "lo", "up")


def carry(devices: list[str], link: Link) -> None:
    """Hand on frames for ever."""
    ports = [_open(device) for device in devices]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    learned: dict[bytes, int] = {}
    free_at = dict.fromkeys(ports, 0.0)
    underway: list[tuple[float, int, int, bytes]] = []  # when it arrives, its number, port, frame
    drawn, number = random.Random(1), 0
    while True:
        due = max(0.0, underway[0][0] - time.monotonic()) if underway else None
        ready, _, _ = select.select(ports, [], [], due)
        now = time.monotonic()
        while underway and underway[0][0] <= now:
            _, _, port, frame = heapq.heappop(underway)
            _write(port, frame)
        for source in ready:
            frame = os.read(source, _FRAME)
            target, sender = frame[:6], frame[6:12]
            learned[sender] = source
            known = learned.get(target)
            for port in [known] if known else [each for each in ports if each != source]:
                begins = max(now, free_at[port])
                if drawn.random() < link.loss or begins > now + _MOST_WAITING_S:
                    continue
                free_at[port] = begins + len(frame) / link.rate
                number += 1
                heapq.heappush(underway, (free_at[port] + link.delay, number, port, frame))


def _open(device: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", device.encode(), flags))
    return descriptor


def _write(port: int, frame: bytes) -> None:
    try:
        os.write(port, frame)
    except OSError:  # the interface is not up, or its queue is full: the frame is lost
        return


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("devices", nargs="+")
    for name in ("rate", "delay", "loss"):
        parser.add_argument(f"--{name}", type=float, required=True)
    given = parser.parse_args()
    carry(given.devices, Link(given.rate, given.delay, given.loss))


if __name__ == "__main__":
    _main()
