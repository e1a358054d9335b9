"""TCP between two nodes: here, both are this machine."""

import pytest

from pipelines.core.machine import free_port
from pipelines.doctor.throughput import Sink, address_of, send


def test_what_is_sent_in_a_moment_is_counted():
    sink = Sink("127.0.0.1")
    assert send(sink.address, 0.2) > 1 << 20
    sink.close()
    with pytest.raises(OSError):
        send(sink.address, 0.2)


def test_nobody_there_is_told():
    with pytest.raises(OSError):
        send(("127.0.0.1", free_port()), 0.1)


def test_the_address_of_an_interface():
    assert address_of("lo") == "127.0.0.1"
    assert address_of("no-such-interface") is None
