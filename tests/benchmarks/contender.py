"""A contender of a benchmark: a process that sets itself up and then does timed rounds on demand.

Nothing but the standard library is imported here: a peer's environment lacks ours.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# One timed round: the work done, in the benchmark's unit, alone or with further figures. Where only
# a part of it counts, the figure `seconds` says how long that took.
Round = Callable[[], float | tuple[float, dict[str, Any]]]
Prepare = Callable[[Path, dict[str, Any]], Round]


def serve(prepare: Prepare) -> None:
    """Prepare in the folder that argv names, then answer each line of stdin with one round."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    seconds, run_round = _timed(lambda: prepare(folder, options))
    _answer(answers, {"seconds": seconds})
    for _ in sys.stdin:
        seconds, result = _timed(run_round)
        amount, figures = result if isinstance(result, tuple) else (result, {})
        seconds = figures.pop("seconds", seconds)
        _answer(answers, {"seconds": seconds, "amount": amount, "figures": figures})


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def _answer(answers: Any, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
