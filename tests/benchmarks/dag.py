"""What the pipeline costs beyond its stages: `llm_pipeline`, and a DAG of tasks that do nothing.

`penstock` is the wall time of a whole run, none of it out of the cache, less the lives of its
stages' processes, from each one's start to its end: scheduling, the workspace, the stage cache, the
submission of Ray jobs and the look at their end are what is left. `nothing` is the wall time of as
many stock tasks that do nothing, on the same Airflow.
"""

from tests.benchmarks.harness import Benchmark, Contender, Demand
from tests.benchmarks.local_platform import local_platform
from tests.benchmarks.startup import make_data

BENCHMARK = Benchmark(
    name="dag",
    unit="run",
    measures="seconds",
    contenders=[Contender("penstock", "dag_ours"), Contender("nothing", "dag_nothing")],
    demands=[Demand(over="nothing", ratio=1.5)],
    make_data=make_data,
    service=local_platform,
)
