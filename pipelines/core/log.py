"""Logging that knows the rank: every line says who speaks, and only rank 0 speaks at INFO."""

import logging
import os
import sys


def rank() -> int:
    """This process's rank in a distributed job, 0 outside one."""
    return int(os.environ.get("RANK", "0"))


def set_up_logging() -> None:
    """Log to stderr; ranks other than 0 only warn."""
    who = f" [rank {rank()}]" if "RANK" in os.environ else ""
    logging.basicConfig(
        level=logging.INFO if rank() == 0 else logging.WARNING,
        format=f"%(asctime)s %(levelname)s{who} %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
