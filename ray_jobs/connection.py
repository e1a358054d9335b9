"""The way of a job's own process into the cluster that it was sent to."""

import os

import ray

from pipelines.core.errors import UserError


def connect() -> None:
    """Join the cluster at RAY_ADDRESS, unless this process is in one already.

    Without an address Ray would start a cluster for this process: on every interface, in the clear,
    and open to anybody where RAY_AUTH_MODE says so, as only `ray start` asks our guard
    (`pipelines/platform/ray_start.py`).

    Raises:
        UserError: there is no address.
    """
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS", "local") in ("", "local"):
        raise UserError(
            'no Ray to run on: submit the command (`eval "$(penstock env)"`, then `ray job submit '
            "--working-dir . -- COMMAND`), or do without Ray by `torchrun -m pipelines.training`"
        )
    ray.init()
