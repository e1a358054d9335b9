"""What the pipeline costs beyond its stages: `llm_pipeline`, and a DAG of tasks that do nothing.

`penstock` is the wall time of a whole run, none of it out of the cache, less what its stages take:
the lives of their Ray jobs as Ray has them, and of the processes of the light ones. Scheduling, the
workspace, the look into the stage cache, the hand-over of jobs and the notice of their end are what
is left. `nothing` is the wall time of as many stock tasks that do nothing, on the same Airflow.
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
