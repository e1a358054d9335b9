"""The ordered map on Ray: of tasks, and of processes that have a GPU each.

Ray is in a process of its own: it reads its environment when it is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

from pipelines.core.settings import PROJECT

# Ray counts GPUs that nobody has: what is tried is who gets which, and for how long.
MAPPED = """
import os
import time
from pathlib import Path

import ray
from ray_jobs.ray_map import map_on_ray

HERE = Path.cwd()

def seen(number):
    (gpu,) = ray.get_gpu_ids()
    (HERE / f"process-{os.getpid()}").touch()
    while len(list(HERE.glob("process-*"))) < 2:  # one may start long before the other
        time.sleep(0.1)
    time.sleep(0.2)
    return number, os.getpid(), gpu

ray.init("local", num_cpus=2, num_gpus=3, log_to_driver=False)
assert list(map_on_ray(str, range(40))) == [str(number) for number in range(40)]
assert list(map_on_ray(str, [])) == []
numbers, processes, gpus = zip(*map_on_ray(seen, range(30), gpus=2))
assert numbers == tuple(range(30))
assert len(set(processes)) == len(set(zip(processes, gpus))) == len(set(gpus)) == 2, gpus
"""


def test_results_come_in_order_and_a_process_keeps_its_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAPPED],
        cwd=tmp_path,
        env={
            **os.environ,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "PYTHONPATH": str(PROJECT),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
