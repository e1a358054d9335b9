"""What the pipeline costs beyond its stages: `llm_pipeline`, and DAGs of tasks that do nothing.

`penstock` is the wall time of a whole run, none of it out of the cache, less what its stages take:
the lives of their Ray jobs as Ray has them, and of the processes of the light ones. Scheduling, the
workspace, the look into the stage cache, the hand-over of jobs and the notice of their end are what
is left. The others have as many stock tasks, on the same Airflow: in `nothing` no task waits for
anything. In `waiting` as many as run Ray jobs wait for a moment in the triggerer, which is taken
off; Airflow's triggerer looks once a second for what is over, whatever its settings.
"""

from tests.benchmarks.harness import Benchmark, Contender, Demand
from tests.benchmarks.local_platform import local_platform
from tests.benchmarks.startup import make_data

BENCHMARK = Benchmark(
    name="dag",
    unit="run",
    measures="seconds",
    contenders=[
        Contender("penstock", "dag_ours"),
        Contender("nothing", "dag_stock", options={"dag": "nothing"}),
        Contender("waiting", "dag_stock", options={"dag": "waiting"}),
    ],
    demands=[Demand(over="nothing", ratio=1.2), Demand(over="waiting", ratio=1.2)],
    make_data=make_data,
    service=local_platform,
)
