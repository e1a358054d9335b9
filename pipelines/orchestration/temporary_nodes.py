"""Nodes for one run: started before it trains and ended after it, even if the run fails.

`PENSTOCK_NODES` names a command of the site: `COMMAND up` lets nodes join the platform's Ray
cluster and returns when they have joined; `COMMAND down` ends them and returns when they are gone.
Both may be called twice, and `down` without `up`. Their environment has PENSTOCK_RUN, the name of
the run's workspace, and PENSTOCK_WORKERS, the most workers of its training. An `up` that starts a
whole Ray cluster for the run writes the address of its Jobs API to the file
PENSTOCK_RAY_ADDRESS_FILE, and the run's jobs go there until `down`.
"""

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
from airflow.providers.standard.hooks.subprocess import SubprocessHook
from airflow.sdk import BaseOperator

from pipelines.core.settings import load_settings
from pipelines.orchestration.jobs_api import ADDRESS_FILE, ray_address
from pipelines.orchestration.ray_job import TaskKilledError
from pipelines.orchestration.trigger_form import PREPARED
from pipelines.run.workspace import read_recipe

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.definitions._internal.node import DAGNode


class NodesOperator(BaseOperator):
    """Runs the site's command; a retry runs it again.

    Args:
        action: The command's argument.
        workspace: The run's workspace.
    """

    template_fields = ("workspace",)

    def __init__(
        self, *, action: Literal["up", "down"], workspace: str = PREPARED, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.action = action
        self.workspace = workspace
        self._hook = SubprocessHook()

    def execute(self, context: "Context") -> None:  # noqa: ARG002
        """Run the command and wait until it ends.

        Raises:
            RuntimeError: The command failed, or it wrote an invalid address.
        """
        try:
            self._run(self.action)
            check_address(Path(self.workspace))
        except BaseException:
            # Airflow runs no teardown after a setup that failed.
            if self.action == "up":
                self._run("down")
            raise

    def _run(self, action: str) -> None:
        workspace = Path(self.workspace)
        command = [*shlex.split(load_settings().nodes_command), action]
        workers = read_recipe(workspace).resources.most_workers
        address = workspace / ADDRESS_FILE
        names = {"PENSTOCK_RUN": workspace.name, "PENSTOCK_WORKERS": str(workers)}
        names |= {"PENSTOCK_RAY_ADDRESS_FILE": str(address)}
        result = self._hook.run_command(command, env={**os.environ, **names}, cwd=self.workspace)
        if result.exit_code:
            raise RuntimeError(f"{shlex.join(command)} exited with code {result.exit_code}")
        if action == "down":
            address.unlink(missing_ok=True)

    def on_kill(self) -> None:
        """End the command and this process; Airflow calls it in a signal handler."""
        with suppress(ProcessLookupError):
            self._hook.send_sigterm()
        raise TaskKilledError("Airflow ends this process of the task")


def check_address(workspace: Path) -> None:
    """Raise RuntimeError if the address of the run's jobs is invalid, before a client fails."""
    said = ray_address(workspace)
    with suppress(httpx.InvalidURL):
        url = httpx.URL(said)
        if url.scheme in ("http", "https") and url.host:
            return
    raise RuntimeError(
        f"{workspace / ADDRESS_FILE}: {said!r} is not an address such as https://head"
    )


def temporary_nodes(first: "DAGNode", last: "DAGNode", after: "DAGNode") -> None:
    """Add tasks for the run's own nodes from `first` to `last`, if the settings name a command.

    Airflow runs the teardown after any failure, and runs both tasks again with cleared tasks.
    """
    if not load_settings().nodes_command:
        return
    up = NodesOperator(
        task_id="nodes_up",
        action="up",
        doc_md="The site's command lets the run's nodes join the Ray cluster.",
    ).as_setup()  # type: ignore[no-untyped-call]
    down = NodesOperator(
        task_id="nodes_down",
        action="down",
        doc_md="The site's command ends the run's nodes, even if the run failed.",
    ).as_teardown(setups=up, on_failure_fail_dagrun=True)
    after >> up >> first
    last >> down
