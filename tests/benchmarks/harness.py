"""Benchmarks: ours against named baselines, in interleaved rounds of one run.

A benchmark is a module here with a `BENCHMARK`; a contender is a script in `contenders/` that runs
as a process of its own, ours in `.venv`, a peer in `.venv-bench`. While one does its round, the
others are stopped (SIGSTOP), threads and children too: nobody works ahead in another's time.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Self

PROJECT = Path(__file__).resolve().parent.parent.parent
VENVS = {"ours": PROJECT / ".venv", "bench": PROJECT / ".venv-bench"}
OURS = "penstock"


@dataclass(frozen=True)
class Contender:
    """Who takes part: `contenders/<script>.py`, run in an environment."""

    name: str
    script: str
    venv: Literal["ours", "bench"] = "ours"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Demand:
    """By how much our rate must exceed a baseline's; in one case, or in all.

    Where seconds are compared, how much of the baseline's ours may at most be. A further figure of
    the rounds, if one is named, is seconds too.
    """

    over: str
    ratio: float
    case: str | None = None
    of: str = OURS
    figure: str | None = None


@dataclass(frozen=True)
class Limit:
    """What a figure may at most be: of the rounds the median, of any other the last round's."""

    figure: str
    most: float
    of: str = OURS


@dataclass(frozen=True)
class Benchmark:
    """What is compared on which data.

    Attributes:
        unit: Of the work that a round returns.
        measures: Units a second, of which more is better, or seconds a unit, of which less is.
        make_data: Fills an empty folder once, deterministically; what it returns is every
            contender's options. The folder is kept between runs.
        cases: Options by the name of each case, such as a warm and a cold cache.
        before_round: Called before each round, untimed, with the data folder and the options.
        service: Runs while the contenders do; what it yields is added to their options.
        warm_up: Rounds of each contender that do not count.
        pairs: Rounds that do, unless a user says how many; fewer are no result to keep.
        limits: What holds whatever a baseline does.
    """

    name: str
    unit: str
    contenders: list[Contender]
    demands: list[Demand]
    make_data: Callable[[Path], dict[str, Any]]
    cases: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    before_round: Callable[[Path, dict[str, Any]], None] | None = None
    service: Callable[[Path], AbstractContextManager[dict[str, Any]]] = lambda _: nullcontext({})
    warm_up: int = 1
    pairs: int = 5
    measures: Literal["rate", "seconds"] = "rate"
    limits: list[Limit] = field(default_factory=list)

    @property
    def figure(self) -> str:
        """What stands in the results, and behind a round's figure."""
        return f"{self.unit}/s" if self.measures == "rate" else "s"

    def value(self, answer: dict[str, Any]) -> float:
        """The figure of one round."""
        rate: float = answer["amount"] / answer["seconds"]
        return rate if self.measures == "rate" else 1 / rate


@dataclass(frozen=True)
class Figures:
    """What one contender's rounds came to."""

    values: list[float]  # a round each
    setup_seconds: float
    rounds: list[dict[str, Any]]  # their further figures

    def summary(self) -> dict[str, Any]:
        """As the results file has it: with the last round's further figures."""
        return spread(self.values) | {"setup_seconds": self.setup_seconds, **self.rounds[-1]}

    def compared(self, figure: str | None) -> list[float]:
        """What a demand compares, a round each."""
        return [each[figure] for each in self.rounds] if figure else self.values


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def run_case(
    benchmark: Benchmark,
    folder: Path,
    options: dict[str, Any],
    pairs: int,
    told: Callable[[str], None],
) -> dict[str, Figures]:
    """Interleave `pairs` rounds of every contender; each second time in the opposite order."""
    with ExitStack() as stack:
        running = {}
        for contender in benchmark.contenders:
            given = options | contender.options
            running[contender.name] = stack.enter_context(_started(contender, folder, given))
            told(f"{contender.name} is ready after {running[contender.name].setup_seconds:.1f} s")
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in running}
        for number in range(-benchmark.warm_up, pairs):
            for name in list(running) if number % 2 == 0 else reversed(running):
                if benchmark.before_round:
                    benchmark.before_round(folder, options)
                answer = running[name].round()
                value = benchmark.value(answer)
                told(f"round {number + 1}/{pairs}: {name} {value:,.4g} {benchmark.figure}")
                if number >= 0:
                    answers[name].append(answer)
        return {
            name: Figures(
                [benchmark.value(answer) for answer in answers[name]],
                process.setup_seconds,
                [answer["figures"] for answer in answers[name]],
            )
            for name, process in running.items()
        }


def ratios(
    benchmark: Benchmark, case: str, figures: dict[str, Figures]
) -> Iterator[dict[str, Any]]:
    """Our figure over each baseline's, pair by pair, beside what is demanded."""
    for demand in benchmark.demands:
        if demand.case not in (None, case) or demand.over not in figures:
            continue
        ours = figures[demand.of].compared(demand.figure)
        theirs = figures[demand.over].compared(demand.figure)
        pairs = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        yield {
            "of": demand.of,
            "over": demand.over,
            **({"figure": demand.figure} if demand.figure else {}),
            "pairs": pairs,
            **spread(pairs),
            "demanded": demand.ratio,
            "reached": _reached(benchmark, demand, statistics.median(pairs)),
        }


def kept_limits(benchmark: Benchmark, figures: dict[str, Figures]) -> Iterator[dict[str, Any]]:
    """Each limit beside the figure that it is for."""
    for limit in benchmark.limits:
        figure = figures[limit.of].summary()[limit.figure]
        facts = {"of": limit.of, "figure": limit.figure, "is": figure, "most": limit.most}
        yield facts | {"reached": figure <= limit.most}


def _reached(benchmark: Benchmark, demand: Demand, ratio: float) -> bool:
    more = benchmark.measures == "rate" and demand.figure is None
    return ratio >= demand.ratio if more else ratio <= demand.ratio


class _Running:
    """A contender's process, stopped but for its rounds."""

    def __init__(self, contender: Contender, folder: Path, options: dict[str, Any]) -> None:
        module = f"tests.benchmarks.contenders.{contender.script}"
        self._name = contender.name
        self._process = subprocess.Popen(
            [_python(contender), "-m", module, str(folder), json.dumps(options)],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.setup_seconds: float = self._answer()["seconds"]
        self._signal(signal.SIGSTOP)

    def round(self) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        _pipe(self._process.stdin).write("\n")
        _pipe(self._process.stdin).flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def _answer(self) -> dict[str, Any]:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise SystemExit(f"{self._name} ended with code {self._process.wait()}; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)  # also ends what is stopped
        self._process.wait()


def _python(contender: Contender) -> str:
    """Return the interpreter of its environment; without `.venv`, the one that runs this."""
    python = VENVS[contender.venv] / "bin" / "python"
    if python.exists():
        return str(python)
    if contender.venv == "bench":
        raise SystemExit(f"{contender.name} needs {python.parent.parent.name}: make bench-env")
    return sys.executable


@contextmanager
def _started(contender: Contender, folder: Path, options: dict[str, Any]) -> Iterator[_Running]:
    with _Running(contender, folder, options) as running:
        yield running


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
