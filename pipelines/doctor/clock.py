"""Whether this machine's clock follows a time server: chrony, or systemd's timesyncd.

When this node's certificate ends: Ray's processes read it as they start, and only then.
"""

import os
import re
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pipelines.doctor.findings import FaultError, NotHereError, Seen, ok, problem, warning
from pipelines.doctor.tools import output_of, read

_DAY_S = 86400.0
_SOON_DAYS = 30.0  # enough to choose a quiet hour
_FIX_CERTIFICATE = "restart Ray on this node, drained first: each start renews the certificate"


def certificate() -> Iterator[Seen]:
    """Look at the node's own."""
    path = os.environ.get("RAY_TLS_SERVER_CERT")
    if os.environ.get("RAY_USE_TLS") != "1" or not path:
        raise NotHereError("this process speaks to no Ray beyond the loopback")
    text = output_of("openssl", "x509", "-noout", "-enddate", "-in", path)
    yield assess_certificate(read(parse, text, "openssl x509 -enddate"), time.time())


def parse(text: str) -> float:
    """Return the end in seconds since 1970, of `notAfter=Nov 22 23:00:00 2027 GMT`.

    Raises:
        ValueError: it is no such line.
    """
    return float(ssl.cert_time_to_seconds(text.strip().removeprefix("notAfter=")))


def assess_certificate(end: float, now: float) -> Seen:
    """Return whether there is time to renew it before nodes and workers can't join any more."""
    days = (end - now) / _DAY_S
    if days <= 0:
        return problem(f"it ended {-days:.0f} days ago: no new worker can join", _FIX_CERTIFICATE)
    saw = f"it ends in {days:.0f} days"
    return warning(saw, _FIX_CERTIFICATE) if days < _SOON_DAYS else ok(saw)


_MUCH_S = 0.1  # by which logs of two nodes still tell what came first
_FIX = "start chronyd (or systemd-timesyncd) with a time server that it can reach"


def clock() -> Iterator[Seen]:
    """Ask who is there."""
    try:
        text = output_of("chronyc", "tracking")
    except NotHereError:
        pass
    except FaultError as error:
        yield warning(str(error), _FIX)
        return
    else:
        yield assess_chrony(read(parse_chrony, text, "chronyc tracking"))
        return
    try:
        yield assess_timedatectl(output_of("timedatectl", "show"))
    except NotHereError:
        raise NotHereError("neither chronyc nor timedatectl is installed") from None
    except FaultError as error:
        if "not been booted with systemd" in str(error):
            raise NotHereError("no chrony and no systemd: a container has its host's") from None
        raise


@dataclass(frozen=True)
class Tracking:
    """How chrony does: whether it follows `server`, and seconds off its time."""

    follows: bool
    server: str
    seconds: float


def parse_chrony(text: str) -> Tracking:
    """Read what `chronyc tracking` prints.

    Raises:
        ValueError: a line that it should have is missing.
    """
    values = dict(re.findall(r"^(.+?)\s*: (.*)$", text, re.MULTILINE))
    off = re.match(r"\d+\.\d+ ", values.get("System time", ""), re.ASCII)
    status, server = values.get("Leap status"), values.get("Reference ID")
    if off is None or status is None or server is None:
        raise ValueError("no System time, Leap status or Reference ID in it")
    return Tracking(status != "Not synchronised", server, float(off[0]))


def assess_chrony(found: Tracking) -> Seen:
    """Return whether it follows a server, and closely."""
    if not found.follows:
        return problem("chrony follows no time server", _FIX)
    saw = f"{found.seconds:.6f} s from {found.server}"
    if found.seconds > _MUCH_S:
        return warning(f"the clock is {saw}", "chronyc makestep")
    return ok(saw)


def assess_timedatectl(text: str) -> Seen:
    """Assess what `timedatectl show` prints."""
    values = dict(line.partition("=")[::2] for line in text.splitlines())
    if values.get("NTPSynchronized") == "yes":
        return ok("systemd says that the clock is synchronised")
    return problem("systemd says that the clock follows no time server", _FIX)
