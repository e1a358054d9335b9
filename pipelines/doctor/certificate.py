"""When this node's certificate ends: Ray's processes read it as they start, and only then."""

import os
import ssl
import time
from collections.abc import Iterator

from pipelines.doctor.findings import NotHereError, Seen, ok, problem, warning
from pipelines.doctor.tools import output_of, read

_DAY_S = 86400.0
_SOON_DAYS = 30.0  # enough to choose a quiet hour
_MEND = "restart Ray on this node, drained first: each start renews the certificate"


def certificate() -> Iterator[Seen]:
    """Look at the node's own."""
    path = os.environ.get("RAY_TLS_SERVER_CERT")
    if os.environ.get("RAY_USE_TLS") != "1" or not path:
        raise NotHereError("this process speaks to no Ray beyond the loopback")
    text = output_of("openssl", "x509", "-noout", "-enddate", "-in", path)
    yield judge(read(parse, text, "openssl x509 -enddate"), time.time())


def parse(text: str) -> float:
    """The end in seconds since 1970, of `notAfter=Nov 22 23:00:00 2027 GMT`.

    Raises:
        ValueError: it is no such line.
    """
    return float(ssl.cert_time_to_seconds(text.strip().removeprefix("notAfter=")))


def judge(end: float, now: float) -> Seen:
    """Whether there is time to renew it before nodes and workers can't join any more."""
    days = (end - now) / _DAY_S
    if days <= 0:
        return problem(f"it ended {-days:.0f} days ago: no new worker can join", _MEND)
    saw = f"it ends in {days:.0f} days"
    return warning(saw, _MEND) if days < _SOON_DAYS else ok(saw)
