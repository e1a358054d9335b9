"""Logging that knows the rank: every line names its rank, and only rank 0 logs at INFO."""

import logging
import os
import sys


def set_up_logging() -> None:
    """Log to stderr; ranks other than 0 log only warnings and errors."""
    rank = os.environ.get("RANK")
    who = f" [rank {rank}]" if rank else ""
    logging.basicConfig(
        level=logging.INFO if rank in (None, "0") else logging.WARNING,
        format=f"%(asctime)s %(levelname)s{who} %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request at INFO
