"""Runs the training engine alone, without Ray, Airflow or MLflow.

torchrun --nproc-per-node 2 -m pipelines.training --recipe debug --set train.steps=50

The processes of all nodes need the same files. After SIGTERM to torchrun or to any process, the
run saves and ends with an error, so that the scheduler can start the same command again. `python -m
pipelines.training` runs one process. This module is a command, not a part of the library: nothing
imports it.

With `--last-step N` it stops after that step. `penstock models reproduce` uses this to repeat a run
that was stopped by its time limit.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from pipelines.core.errors import EXIT_USER_ERROR, SharedError, UserError
from pipelines.core.log import set_up_logging
from pipelines.parallel.process_group import rank
from pipelines.run.records import record_path
from pipelines.stages.standalone import Job, open_workspace, parse_job
from pipelines.training import preemption
from pipelines.training.preemption import EXIT_BY_SIGTERM, PreemptedError

_LAST_WORDS_S = 30  # at most; torchrun usually ends the wait at once
_PREPARATION = timedelta(days=7)  # preprocessing may take longer than a collective's usual timeout


def main(arguments: Sequence[str]) -> None:
    """Train a recipe; a user's error exits with 2 and one line."""
    set_up_logging()
    preemption.listen()
    try:
        _train(*_parse(arguments))
    except UserError as error:
        if rank() == 0 or not isinstance(error, SharedError):
            sys.stderr.write(f"train: {error}\n")
        else:
            # torchrun ends all processes at the first exit, so wait for rank 0 to print the error.
            time.sleep(_LAST_WORDS_S)
        sys.exit(EXIT_USER_ERROR)
    except PreemptedError as ended:
        if rank() == 0:
            sys.stderr.write(f"train: {ended} when the same command is started again\n")
        sys.exit(EXIT_BY_SIGTERM)


def _parse(arguments: Sequence[str]) -> tuple[Job, int | None]:
    """Return the job and its last step; results and errors are the same in every process."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--last-step", type=int)
    own, arguments = parser.parse_known_args(arguments)
    workers = os.environ.get("WORLD_SIZE", "1")  # torchrun sets the number, not the recipe
    program = "torchrun -m pipelines.training"
    try:
        job = parse_job(program, arguments, [f"resources.workers={workers}"])
    except UserError as error:
        raise SharedError(str(error)) from error
    return job, own.last_step


def _train(job: Job, last_step: int | None) -> None:
    from pipelines.core.settings import load_settings
    from pipelines.parallel.process_group import process_group
    from pipelines.stages.train import train_stage
    from pipelines.training.machine_notice import watching

    with process_group(), ExitStack() as held:
        held.enter_context(
            watching(load_settings().notice, lambda notice: preemption.ask(notice.reason))
        )

        def prepare() -> str:
            workspace = held.enter_context(open_workspace(job))
            _preprocess(job, workspace)
            return str(workspace)

        workspace = Path(_from_first(prepare))
        record = train_stage.run(job.recipe, workspace, last_step=last_step)
        if record is not None:
            print(f"loss {record.metrics['loss']:.4f}, {workspace}")  # noqa: T201


def _preprocess(job: Job, workspace: Path) -> None:
    from pipelines.stages.preprocess import preprocessing

    if not record_path(workspace, preprocessing.STAGE).is_file():
        preprocessing.run(job.recipe, workspace)


def _from_first(prepare: Callable[[], str]) -> str:
    """Run `prepare` in the first process, and return its result or raise its error in all."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return prepare()
    said: list[str | None] = [None, None]
    mine: UserError | None = None
    if rank() == 0:
        try:
            said = [prepare(), None]
        except UserError as error:
            mine, said = error, [None, str(error)]
    dist.broadcast_object_list(said, group=dist.new_group(backend="gloo", timeout=_PREPARATION))
    result, error_line = said
    if result is None:
        raise SharedError(error_line or "") from mine
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
