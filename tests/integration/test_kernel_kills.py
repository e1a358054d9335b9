"""Ray does not know that a kernel ended a worker for want of memory; each node's kernel does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.settings import PROJECT

# In a process of its own, as any Ray; where the counts were lower before, somebody was ended since.
OVERSEER = """
import sys
from pathlib import Path
import ray
from pipelines.recipe.recipe_files import load_recipe
from ray_jobs.train_overseer import Overseer

ray.init(num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
overseer = Overseer(load_recipe("debug"), Path(sys.argv[1]), "life")
(node,) = before = overseer._kills
print(overseer._kernel_ran_out([node]))
overseer._kills = {node: before[node] - 1, "0" * 56: -1}
print(overseer._kernel_ran_out([node]))
print(overseer._kernel_ran_out(["0" * 56]))  # a node that is gone tells nothing
"""


@pytest.mark.parity
@pytest.mark.skipif(" " in sys.executable, reason="Ray's own commands take no such path")
@pytest.mark.timeout(600)
def test_a_node_tells_whether_its_kernel_ended_processes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OVERSEER, tmp_path],
        cwd=PROJECT,
        env=os.environ | {"PENSTOCK_HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["False", "True", "False"]
