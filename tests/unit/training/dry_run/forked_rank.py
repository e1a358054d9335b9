"""A rank's dry run in a process that need not import torch, which is most of what one takes."""

import os
import resource
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from pipelines.training.dry_run.dry_run import HOST_BYTES, Case, RankReport
from tests.forked import start


def forked_rank(case: Case, rank: int, _: str) -> RankReport:
    """What `dry_run` does for each rank, otherwise in an interpreter of its own."""
    ours, theirs = Pipe()
    none = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = start(_answer, theirs, case.to_json(), rank, **none)
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        answer = "the process is gone"
    process.join()
    assert isinstance(answer, RankReport), answer
    return answer


def _answer(connection: Connection, case: str, rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (HOST_BYTES, HOST_BYTES))
    from pipelines.training.dry_run.one_rank import run_rank

    try:
        connection.send(run_rank(Case.from_json(case), rank))
    except BaseException:
        connection.send(traceback.format_exc())
    os._exit(0)  # as an ending interpreter frees what torch still calls
