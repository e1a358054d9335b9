"""Known vulnerabilities of what a lock file names: pip-audit asks OSV. Exits with 1 for any.

Where OSV can't be reached nothing is known, and one line says so: a machine without that way out
has no verdict, which is not a bad one. Whatever else goes wrong is an error.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

PIP_AUDIT = "pip-audit@2.10.1"
OSV = os.environ.get(
    "PIP_AUDIT_OSV_URL", "https://api.osv.dev/v1/query"
)  # pip-audit's own variable
# Of 2010, with advisories ever since: who knows none of these would find every package clean.
KNOWN_BAD = {"package": {"name": "jinja2", "ecosystem": "PyPI"}, "version": "2.4.1"}
TIMEOUT_S = 15
# Known, without a version that has them fixed, and why they do no harm here.
ACCEPTED = {
    "CVE-2023-48022": "Ray's Jobs API runs what it is told: nobody gets there without the token",
    "CVE-2025-34351": "Ray's token is off by default: none of ours starts without it",
    "CVE-2025-69872": "diskcache unpickles: DVC's caches lie in the run's own workspace",
}


def can_be_asked() -> bool:
    """Return whether OSV answers, and knows anything; it has to, where it answers."""
    question = Request(OSV, json.dumps(KNOWN_BAD).encode())  # noqa: S310 (OSV's own address)
    try:
        with urlopen(question, timeout=TIMEOUT_S) as answer:  # noqa: S310
            known = json.load(answer).get("vulns")
    except HTTPError as error:
        sys.exit(f"error: {OSV} answers {error}")
    except (URLError, TimeoutError) as error:
        sys.stdout.write(f"not audited: {OSV} can't be reached: {error}\n")
        return False
    if not known:
        sys.exit(f"error: {OSV} knows no vulnerability of jinja2 2.4.1, which has several")
    return True


def audit(lock: str) -> int:
    """Ask about each pin; a package that can't be asked about is an error, too."""
    uv = Path(sys.executable).with_name("uv")
    options = ["--strict", "--disable-pip", "--no-deps", "--progress-spinner=off"]
    service = ["--vulnerability-service=osv", f"--osv-url={OSV}"]
    accepted = [f"--ignore-vuln={name}" for name in ACCEPTED]
    command = [uv, "tool", "run", PIP_AUDIT, *options, *service, *accepted, "--requirement", lock]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(audit(sys.argv[1]) if can_be_asked() else 0)
