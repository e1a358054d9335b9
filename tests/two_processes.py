"""What two processes of a group are told, as torchrun would."""

import os
import socket
from pathlib import Path


def group_variables(test_file: Path) -> dict[str, str]:
    """The environment that both share; they may import the project and what lies by the test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{test_file.parents[3]}{os.pathsep}{test_file.parent}",
    }
