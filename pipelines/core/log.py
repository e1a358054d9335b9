"""Logging that knows the rank: every line says who speaks, and only rank 0 speaks at INFO."""

import logging
import os
import sys


def set_up_logging() -> None:
    """Log to stderr; ranks other than 0 only warn."""
    rank = os.environ.get("RANK")
    who = f" [rank {rank}]" if rank else ""
    logging.basicConfig(
        level=logging.INFO if rank in (None, "0") else logging.WARNING,
        format=f"%(asctime)s %(levelname)s{who} %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
