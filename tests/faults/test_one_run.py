"""What `make test` injects: rows 9, 1 and 8 one after another into one run.

Each of them alone, and every other row, is in `make test-faults`. There the weights are compared
with those of a run that nothing befell; here with those that torchrun makes of its lineage, which
takes a third of such a run's time.
"""

import json
import shutil

import pytest

from tests.faults.processes import frozen, handing_over, kill, kill_tree, service, train_worker

STEPS = 500  # enough for three faults


@pytest.mark.timeout(1500)
def test_a_run_outlives_its_task_process_a_train_worker_and_the_ray_head(scenario):
    run = scenario.start(train__steps=STEPS)

    def taken_over() -> bool:
        """A cluster that is lost before another task waits for its job is told of by nobody."""
        return "task lost" in run.told and run.task_state("train") == "deferred"

    with handing_over(run, "train") as task:
        kill(task)
    # Else the training would be over on a fast machine before Airflow tries again.
    workers = [train_worker(run, rank) for rank in range(2)]
    with frozen(workers[0]), frozen(workers[1]), run.fault("task lost", taken_over):
        pass
    assert len(scenario.watch.seen(run, "train")) == 1
    run.wait_for_step()
    # Not the next step in the history: the other rank may write of one that it took before.
    with run.fault("worker lost", lambda: "resume" in run.told):
        kill(train_worker(run, rank=1))
    with run.fault("cluster lost"):
        kill_tree(service(run.platform, "ray"))
    scenario.ends_well(run)
    done = run.platform.penstock("models", "reproduce", f"{run.model}@1", "--json", timeout=600)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["equal"], made["differing"]) == (True, [])
    shutil.rmtree(made["workspace"])
