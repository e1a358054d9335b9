"""Processes that are kept from one test to the next, as to start them takes seconds.

A test names a function of a module, which all of them call alike, as one gloo group:

    losses = pool(4).run(train_case, case, folder)
"""

import itertools
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START_SECONDS = 180  # of processes that import torch, on a busy machine
# With all that `_serve` imports, or each process would import it by itself.
_PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "pipelines.training.trainer",
]
_RUNS = 8  # of the same processes
_GRACE_SECONDS = 5  # for the others, after an error in one


class Pool:
    """So many processes; new ones after an error that left them apart, and after some runs.

    A mesh's groups outlive it in PyTorch's caches, each with threads that never rest: after a
    hundred tests these would be all that a machine does.
    """

    def __init__(self, world: int) -> None:
        """Nothing is started yet."""
        self.world = world
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._runs = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float = 300) -> list[Any]:
        """Call `function(*arguments)` in each process, and return what each one returned.

        Raises:
            RuntimeError: with the traceback of the process that failed first.
            TimeoutError: not all ended in time.
        """
        if self._runs == _RUNS:
            self.close()
        if not self._processes:
            self._start()
        self._runs += 1
        for connection in self._connections:
            connection.send((function, arguments))
        return self._collect(seconds)

    def close(self) -> None:
        """Kill them."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._runs = [], [], 0
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        # One process imports torch, and the others are forked from it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-pool-")
        stores = Path(self._folder.name)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, stores, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._collect(START_SECONDS)

    def _collect(self, seconds: float) -> list[Any]:
        """Every process's answer; after the first error the others have little time left."""
        deadline = time.monotonic() + seconds
        waiting = dict(zip(self._connections, range(self.world), strict=True))
        results: list[Any] = [None] * self.world
        failure: str | None = None
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), deadline - time.monotonic())
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    succeeded, results[rank] = connection.recv()
                except EOFError:
                    succeeded, results[rank] = False, "the process is gone"
                if not succeeded and failure is None:
                    failure = f"in process {rank} of {self.world}:\n{results[rank]}"
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if waiting or any(not process.is_alive() for process in self._processes):
            self.close()
        if failure is not None:
            raise RuntimeError(failure)
        if waiting:
            raise TimeoutError(f"processes {sorted(waiting.values())} took over {seconds} seconds")
        return results


def _serve(rank: int, world: int, stores: Path, connection: Connection) -> None:
    """Do what is asked until nobody is there to ask, each time in a new group."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    connection.send((True, None))
    for number in itertools.count():
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        meeting = f"file://{stores / str(number)}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
        try:
            connection.send((True, function(*arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        dist.destroy_process_group()
        # torch finds out once for all meshes that look alike, and keeps the groups of the first.
        _clear_sharding_prop_cache()
