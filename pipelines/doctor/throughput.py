"""How much TCP carries between two nodes, on the interfaces of a plane."""

import contextlib
import socket
import threading
import time

_CHUNK = 1 << 20
_CONNECTIONS = 4  # one stream does not fill a fast link
_CONNECT_S = 5.0


def address_of(interface: str) -> str | None:
    """Its IPv4 address on this machine; None where it has none."""
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
