"""A DAG of stock tasks that do nothing."""

import itertools
import os
from pathlib import Path
from typing import Any

from tests.benchmarks.contender import Round, serve
from tests.benchmarks.local_platform import connect, seconds_of_run

DAG = "nothing"


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    _, airflow = connect(DAG)
    numbers = itertools.count()

    def run_round() -> tuple[float, dict[str, Any]]:
        run_id = f"nothing-{os.getpid()}-{next(numbers)}"
        airflow.trigger(DAG, run_id, {})
        return 1.0, {"seconds": seconds_of_run(airflow, DAG, run_id)}

    return run_round


if __name__ == "__main__":
    serve(prepare)
