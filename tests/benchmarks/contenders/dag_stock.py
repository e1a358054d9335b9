"""A DAG of stock tasks, less the seconds for which they were told to wait."""

import itertools
import os
from pathlib import Path
from typing import Any

from pipelines.run.records import stage_names
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.dags.benchmarks import WAIT_S, waits
from tests.benchmarks.local_platform import connect, seconds_of_run


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    dag = options["dag"]
    waited = WAIT_S * sum(map(waits, stage_names())) if dag == "waiting" else 0
    _, airflow = connect(dag)
    numbers = itertools.count()

    def run_round() -> tuple[float, dict[str, Any]]:
        run_id = f"{dag}-{os.getpid()}-{next(numbers)}"
        airflow.trigger(dag, run_id, {})
        return 1.0, {"seconds": seconds_of_run(airflow, dag, run_id) - waited}

    return run_round


if __name__ == "__main__":
    serve(prepare)
