"""The whole pipeline with nothing changed: what each task costs beyond one that does nothing.

A round runs a DAG of stock tasks that do nothing, and then the pipeline, all of it out of the stage
cache but *register*, which compares again. A stage's own work is its task's duration less the
median duration of those tasks: both begin with a process, and with the reading of a DAG file.
"""

from pipelines.run.records import stage_names
from tests.benchmarks.harness import Benchmark, Contender, Limit
from tests.benchmarks.local_platform import local_platform
from tests.benchmarks.startup import make_data

MOST_S = 2.0

BENCHMARK = Benchmark(
    name="cached",
    unit="slowest stage",
    measures="seconds",
    contenders=[Contender("penstock", "cached_ours")],
    demands=[],
    limits=[Limit("median", MOST_S), *(Limit(stage, MOST_S) for stage in stage_names())],
    make_data=make_data,
    service=local_platform,
)
