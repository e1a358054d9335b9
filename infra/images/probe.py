"""End with an error where a URL does not answer with success: probe.py URL."""

import sys
from urllib.request import urlopen

if __name__ == "__main__":
    urlopen(sys.argv[1], timeout=8).close()  # noqa: S310  # an address of our own manifests
