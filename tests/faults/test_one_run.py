"""What `make test` injects: rows 9, 1 and 8 one after another into one run.

Each of them alone, and every other row, is in `make test-faults`.
"""

import pytest

from tests.faults.processes import handing_over, kill, kill_tree, service, train_worker


@pytest.mark.timeout(1500)
def test_a_run_outlives_its_task_process_a_train_worker_and_the_ray_head(scenario, reference):
    run = scenario.start()
    with run.fault("task lost", lambda: run.step > 0), handing_over(run, "train") as task:
        kill(task)
    assert len(scenario.watch.seen(run, "train")) == 1
    run.wait_for_step()
    with run.fault("worker lost"):
        kill(train_worker(run, rank=1))
    with run.fault("cluster lost"):
        kill_tree(service(run.platform, "ray"))
    scenario.ends_well(run, like=reference)
