"""The whole pipeline with nothing changed: what each task costs beyond one that does nothing.

A round runs a DAG of stock tasks that do nothing, and then the pipeline, all of it out of the stage
cache but *register*, which compares again. A stage's own work is its task's duration less the
median duration of those tasks: both begin with a process, and with the reading of a DAG file.
`whole` is the pipeline's time from its queueing to its end, Airflow's own part included.
"""

from pipelines.run.records import stage_names
from tests.benchmarks.harness import Benchmark, Contender, Limit
from tests.benchmarks.local_platform import local_platform
from tests.benchmarks.startup import make_data

MOST_S, WHOLE_S = 2.0, 10.0

BENCHMARK = Benchmark(
    name="cached",
    unit="slowest stage",
    measures="seconds",
    contenders=[Contender("penstock", "cached_ours")],
    demands=[],
    limits=[
        Limit("median", MOST_S),
        *(Limit(stage, MOST_S) for stage in stage_names()),
        Limit("whole", WHOLE_S),
    ],
    make_data=make_data,
    service=local_platform,
)
