"""How much TCP carries between two nodes, on the interfaces of a plane.

Collectives: NCCL's version, what steers it, and an all-reduce over this machine's GPUs.

Without GPUs it is gloo's, over two processes.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping

from pipelines.core.formatting import size
from pipelines.doctor.findings import Seen, ok, problem, warning
from pipelines.doctor.torch_probe import Facts, facts

_CHUNK = 1 << 20
_CONNECTIONS = 4  # one stream does not fill a fast link
_CONNECT_S = 5.0


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of a network device here; None if it has none."""
    import psutil  # type: ignore[import-untyped]

    for each in psutil.net_if_addrs().get(interface, ()):
        if each.family == socket.AF_INET:
            return str(each.address)
    return None


class Sink:
    """Takes whatever comes, and forgets it."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0), backlog=_CONNECTIONS)
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those that there are end with their sender."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._swallow, args=(connection,), daemon=True).start()

    @staticmethod
    def _swallow(connection: socket.socket) -> None:
        into = bytearray(_CHUNK)
        with connection, contextlib.suppress(OSError):
            while connection.recv_into(into):
                pass


def send(address: tuple[str, int], seconds: float) -> float:
    """Bytes/s that a sink takes from here.

    Raises:
        OSError: nobody answers there.
    """
    sent = [0] * _CONNECTIONS
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(address, timeout=_CONNECT_S))
            for _ in range(_CONNECTIONS)
        ]
        began = time.perf_counter()

        def work(number: int) -> None:
            chunk = bytes(_CHUNK)
            while time.perf_counter() - began < seconds:
                connections[number].sendall(chunk)
                sent[number] += _CHUNK

        threads = [threading.Thread(target=work, args=(n,)) for n in range(_CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return sum(sent) / (time.perf_counter() - began)


# Each takes a path away. NVIDIA's NCCL guide lists them for debugging only: "should not be used in
# production" (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
_DEBUGGING = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NET_GDR_DISABLE")


def collective() -> Iterator[Seen]:
    """Yield a real all-reduce, and the environment it runs in."""
    yield from assess_collectives(facts(), os.environ)


def assess_collectives(found: Facts, environ: Mapping[str, str]) -> Iterator[Seen]:
    """Yield what it summed, and how fast."""
    with_what = f"NCCL {found.nccl}" if found.nccl else "gloo"
    saw = f"{with_what}: an all-reduce over {found.processes} processes"
    if not found.reduced.right:
        fix = "run it again with NCCL_DEBUG=INFO, then GPU by GPU: one computes or sends wrongly"
        yield problem(f"{saw} gave a wrong sum", fix)
    elif found.processes == 1:
        yield ok(f"{with_what}; one GPU has nobody to send to")
    else:
        yield ok(f"{saw}, bus bandwidth {size(found.reduced.bandwidth)}/s")
    if found.pinned:
        fix = "raise memlock and the container's memory limit; other processes may hold much"
        yield problem(f"memory can't be pinned: {found.pinned}", fix)
    for name in _DEBUGGING:
        if environ.get(name, "0") != "0":
            fix = f"unset {name}, and see in NCCL_DEBUG=INFO whether the reason for it is gone"
            yield warning(f"{name}={environ[name]} takes a path away from NCCL", fix)
