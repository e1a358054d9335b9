"""End with an error where a service is not well: probe.py URL [PART].

The URL must answer with success, and where a part of Airflow is named, say that this is healthy:
`airflow jobs check` asks the same and loads the whole of Airflow for it, seconds of a core.
"""

import json
import sys
from urllib.request import urlopen

if __name__ == "__main__":
    url, *parts = sys.argv[1:]
    with urlopen(url, timeout=8) as answer:  # noqa: S310  # an address of our own manifests
        told = answer.read()
    if ill := {part for part in parts if json.loads(told)[part]["status"] != "healthy"}:
        sys.exit(f"not healthy: {', '.join(ill)}")
