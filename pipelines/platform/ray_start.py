"""Settings that `ray start` has no option for; RAY_START_HOOK makes Ray call it on every node."""

import ipaddress
import os
from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError
from pipelines.platform import warm_python

TLS_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
# Where Ray looks for a node's own token if it asks Kubernetes whose tokens are valid.
ACCOUNT_TOKEN = "/var/run/secrets/ray.io/serviceaccount/token"  # noqa: S105 (a path)


def guard(ray_params: Any, _: bool) -> None:
    """Stop `ray start` if others could use the node without the token or read its traffic.

    A user who reaches the Jobs API can run any program, and Ray by default opens it to everyone.
    """
    try:
        check_node(ray_params.node_ip_address, ray_params.dashboard_host)
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
    # Do not start the Ray Client server, which we do not use. It costs four seconds of a core and
    # needs a fixed port. On a busy machine, if the node takes over 30 s to register, it gives up
    # and ends the whole head node.
    ray_params.ray_client_server_port = None
    if warm_python.SOCKET in os.environ:
        ray_params.setup_worker_path = warm_python.__file__


def check_node(address: str | None, dashboard: str) -> None:
    """Check that a node requires a token and sends unencrypted data only on the loopback.

    Args:
        address: The node's address; None means that Ray takes that of a network interface.
        dashboard: The address on which the dashboard, with the Jobs API, would listen.

    Raises:
        UserError: The node does not.
    """
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise UserError("Ray would let everyone in: set RAY_AUTH_MODE=token")
    _check_token()
    if not _is_loopback(dashboard):
        raise UserError(
            f"--dashboard-host={dashboard}: Ray's HTTP has no TLS; let it listen on 127.0.0.1 "
            "and put a proxy with a certificate in front of it"
        )
    if _is_loopback(address):
        return
    if os.environ.get("RAY_USE_TLS") != "1":
        raise UserError(
            "a Ray node beyond the loopback would send its token and data unencrypted: set "
            f"RAY_USE_TLS=1 and {', '.join(TLS_FILES)}"
        )
    for variable in TLS_FILES:
        if not Path(os.environ.get(variable, "")).is_file():
            raise UserError(f"{variable}={os.environ.get(variable, '')!r}: there is no such file")


def _check_token() -> None:
    """Check that Ray finds a token where it looks for one."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not path and os.environ.get("RAY_ENABLE_K8S_TOKEN_AUTH") == "true":
        path = ACCOUNT_TOKEN
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if path:
        token = Path(path).read_text() if Path(path).is_file() else ""
    if not token.strip():
        raise UserError(
            f"Ray has no token in {path}: write one into that file"
            if path
            else "Ray has no token: set RAY_AUTH_TOKEN_PATH to a file that holds one"
        )


def _is_loopback(address: str | None) -> bool:
    """Return whether only this machine reaches the address; False for names and for None."""
    if address is None:
        return False
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
