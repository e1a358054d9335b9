"""Whether this machine's clock follows a time server: chrony, or systemd's timesyncd."""

import re
from collections.abc import Iterator

from pipelines.doctor.findings import FaultError, NotHereError, Seen, ok, problem, warning
from pipelines.doctor.tools import output_of

_MUCH_S = 0.1  # by which logs of two nodes still tell what came first
_MEND = "start chronyd (or systemd-timesyncd) with a time server that it can reach"


def clock() -> Iterator[Seen]:
    """Ask who is there."""
    try:
        yield judge_chrony(output_of("chronyc", "tracking"))
        return
    except NotHereError:
        pass
    except FaultError as error:
        yield warning(str(error), _MEND)
        return
    try:
        yield judge_timedatectl(output_of("timedatectl", "show"))
    except NotHereError:
        raise NotHereError("neither chronyc nor timedatectl is installed") from None
    except FaultError as error:
        if "not been booted with systemd" in str(error):
            raise NotHereError("no chrony and no systemd: a container has its host's") from None
        raise


def judge_chrony(text: str) -> Seen:
    """Of `chronyc tracking`."""
    values = dict(re.findall(r"^(.+?)\s*: (.*)$", text, re.MULTILINE))
    if values.get("Leap status") == "Not synchronised":
        return problem("chrony follows no time server", _MEND)
    seconds = float(values["System time"].split()[0])
    saw = f"{seconds:.6f} s from {values['Reference ID']}"
    return warning(f"the clock is {saw}", "chronyc makestep") if seconds > _MUCH_S else ok(saw)


def judge_timedatectl(text: str) -> Seen:
    """Of `timedatectl show`."""
    values = dict(line.partition("=")[::2] for line in text.splitlines())
    if values.get("NTPSynchronized") == "yes":
        return ok("systemd says that the clock is synchronised")
    return problem("systemd says that the clock follows no time server", _MEND)
