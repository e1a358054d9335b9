"""The ordered map on a Ray cluster, by Ray Data: the same results as `map_in_process`."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import ray
from ray import cloudpickle

from pipelines.core.errors import UserError

T = TypeVar("T")
R = TypeVar("R")


def map_on_ray(function: Callable[[T], R], items: Sequence[T], *, gpus: int = 0) -> Iterator[R]:
    """Run one task an item on the connected cluster; results stream back in the items' order.

    Items and results travel pickled, each in a row of its own, so a task is exactly one call and
    the results do not depend on Ray's blocks. Ray Data limits how far the tasks run ahead.

    With GPUs, calls run in as many processes at most, each with a GPU for as long as there are
    items: what one call has loaded onto it is there for the next.

    Raises:
        UserError: a call raised it; it comes back as itself, without Ray's traceback and retries.
    """
    if not items:
        return
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    with ray.data.DataContext.current(context):  # the dataset keeps it
        pickled = [{"item": cloudpickle.dumps(item)} for item in items]
        rows = ray.data.from_items(pickled, override_num_blocks=len(pickled))
    for row in _mapped(rows, function, gpus).iter_rows():
        result = cloudpickle.loads(row["result"])
        if isinstance(result, UserError):
            raise result
        yield result


def _mapped(rows: Any, function: Callable[[T], R], gpus: int) -> Any:
    if not gpus:
        return rows.map(_Call(function))
    # Of a class Ray Data makes an object a process, which stays.
    processes = ray.data.ActorPoolStrategy(min_size=1, max_size=gpus)
    return rows.map(_Call, fn_constructor_args=[function], compute=processes, num_gpus=1)


class _Call:
    """One row in, one row out."""

    def __init__(self, function: Callable[[T], R]) -> None:
        self._function = function

    def __call__(self, row: dict[str, bytes]) -> dict[str, bytes]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one CPU
        try:
            result: object = self._function(cloudpickle.loads(row["item"]))
        except UserError as error:
            result = error
        return {"result": cloudpickle.dumps(result)}
