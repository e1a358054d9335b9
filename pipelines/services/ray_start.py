"""What `ray start` can't be told by an option; Ray calls it by RAY_START_HOOK."""

from typing import Any


def without_ray_client(ray_params: Any, _: bool) -> None:
    """Leave out the Ray Client server, which nothing here uses.

    It costs four seconds of a core, wants a fixed port, and when the machine is so busy that the
    node takes over 30 s to register it gives up and takes the whole head with it.
    """
    ray_params.ray_client_server_port = None
