"""What `ray start` can't be told by an option; Ray calls it by RAY_START_HOOK on every node."""

import ipaddress
import os
from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError

TLS_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")


def guard(ray_params: Any, _: bool) -> None:
    """End `ray start` where others could use the node without the token, or listen to it.

    Whoever reaches the Jobs API runs what they like, and Ray by itself starts it open to all.
    """
    try:
        check_node(ray_params.node_ip_address, ray_params.dashboard_host)
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
    # The Ray Client server, which nothing here uses, costs four seconds of a core, wants a fixed
    # port, and when the machine is so busy that the node takes over 30 s to register it gives up
    # and takes the whole head with it.
    ray_params.ray_client_server_port = None


def check_node(address: str | None, dashboard: str) -> None:
    """See that a node asks for a token and speaks in the clear on the loopback only.

    Args:
        address: of the node; None: Ray takes that of a network interface.
        dashboard: where the dashboard, with the Jobs API, would listen.

    Raises:
        UserError: it does not.
    """
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise UserError("Ray would let everybody in: set RAY_AUTH_MODE=token")
    if not _token().strip():
        raise UserError("Ray has no token: name a file that holds one in RAY_AUTH_TOKEN_PATH")
    if not _is_loopback(dashboard):
        raise UserError(
            f"--dashboard-host={dashboard}: Ray's HTTP knows no TLS; let it listen on 127.0.0.1 "
            "and put a proxy with a certificate in front of it"
        )
    if _is_loopback(address):
        return
    if os.environ.get("RAY_USE_TLS") != "1":
        raise UserError(
            "a Ray node beyond the loopback would send its token and its data in the clear: set "
            f"RAY_USE_TLS=1 and {', '.join(TLS_FILES)}"
        )
    for variable in TLS_FILES:
        if not Path(os.environ.get(variable, "")).is_file():
            raise UserError(f"{variable}={os.environ.get(variable, '')!r}: no such file")


def _token() -> str:
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if path:
        return Path(path).read_text() if Path(path).is_file() else ""
    return os.environ.get("RAY_AUTH_TOKEN", "")


def _is_loopback(address: str | None) -> bool:
    """Whether only this machine reaches it; of a name, or of what Ray would choose: no."""
    if address is None:
        return False
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
