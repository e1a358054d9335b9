"""Processes for tests in which some die, race or meet: each is there at once.

They are forked from one that has imported what takes seconds, and has done nothing else.
"""

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

_PRELOADED = [
    "pytest",
    "dvc.repo",
    "mlflow",
    "model_signing",
    "torch.distributed.fsdp",
    "pipelines.stages.preprocess.preprocessing",
    "pipelines.stages.register.register_stage",
    "pipelines.stages.train.train_stage",
    "pipelines.training.trainer",
]


def forkserver() -> ForkServerContext:
    """What starts them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def start(function: Callable[..., Any], *arguments: Any, **variables: str) -> BaseProcess:
    """Call a function of a module in a process that has this one's environment, and some more."""
    environment = dict(os.environ) | variables
    process = forkserver().Process(
        target=_call, args=(environment, function, arguments), daemon=True
    )
    process.start()
    return process


def start_group(function: Callable[..., Any], *arguments: tuple[Any, ...]) -> list[BaseProcess]:
    """As torchrun would: a process for each of the arguments, told of the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(len(arguments)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [
        start(function, *each, **shared, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank, each in enumerate(arguments)
    ]


def exit_codes(processes: list[BaseProcess], seconds: float = 120) -> list[int | None]:
    """Of each, once all have ended; who does not is killed."""
    for process in processes:
        process.join(seconds)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def _call(
    environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    function(*arguments)
