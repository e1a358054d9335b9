"""The sbatch script with the real Ray: two nodes with token and TLS, one job, and nothing left.

Slurm is the stub of the unit tests; both nodes are raylets of this machine, on the loopback.
"""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from pipelines.core.settings import PROJECT
from pipelines.services.preflight import free_port
from tests.unit.infra.test_slurm import SLURM, STUBS

# Two nodes of one machine: Ray would put its address in the place of 127.0.0.1, and a port of its
# own choice would be the other's.
RAY = """
import sys
from ray._private import services
from ray.scripts import scripts
services.resolve_ip_for_localhost = lambda host: host
if sys.argv[1] == "start":
    ports = ("dashboard-agent-listen", "min-worker", "max-worker")
    sys.argv += [f"--{name}-port=0" for name in ports]
scripts.main()
"""
JOB = """
import os, time, ray
ray.init(log_to_driver=False)
deadline = time.monotonic() + 120
while len(alive := [node for node in ray.nodes() if node["Alive"]]) < 2:
    assert time.monotonic() < deadline, alive
    time.sleep(0.5)
where = ray.remote(lambda: ray.get_runtime_context().get_node_id())
spread = where.options(scheduling_strategy="SPREAD", num_cpus=1)
found = set()
while len(found) < 2:
    assert time.monotonic() < deadline, found
    found |= set(ray.get([spread.remote() for _ in range(4)]))
print("nodes that computed:", len(found), "TLS:", os.environ["RAY_USE_TLS"])
"""


def test_two_nodes_of_a_slurm_job_are_one_ray_cluster(tmp_path: Path) -> None:
    project = tmp_path / "project"
    stubs = tmp_path / "stubs"
    for folder in (project, stubs):
        folder.mkdir()
    for name in ("scontrol", "srun"):
        (stubs / name).write_text(f"#!/usr/bin/env bash\n{STUBS[name]}\n")
    (stubs / "hostname").write_text("#!/bin/sh\necho 127.0.0.1\n")
    (tmp_path / "loopback.py").write_text(RAY)
    run_it = f"exec '{sys.executable}' '{tmp_path}/loopback.py'"
    (stubs / "ray").write_text(f'#!/bin/sh\n{run_it} "$@"\n')
    for stub in stubs.iterdir():
        stub.chmod(0o755)
    (project / "infra").symlink_to(PROJECT / "infra")
    (project / "job.py").write_text(JOB)
    environment = os.environ | {
        "PATH": f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(PROJECT),
        "PENSTOCK_HOME": str(tmp_path / "home"),
        "PENSTOCK_RAY_PORT": str(free_port()),
        "PENSTOCK_RAY_GCS_PORT": str(free_port()),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # of several nodes
        "RAY_TMPDIR": "/tmp",
        "SLURM_SUBMIT_DIR": str(project),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost,node-1",  # the second finds the first by its name
        "SLURM_CPUS_ON_NODE": "1",
        "SLURM_GPUS_ON_NODE": "0",
    }
    command = ["bash", str(SLURM / "penstock.sbatch"), "python", "job.py"]
    before = _ray_processes()
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "nodes that computed: 2 TLS: 1" in ended.stdout
    left = _ray_processes() - before
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not alive
    assert not (tmp_path / "home" / "slurm" / environment["SLURM_JOB_ID"]).exists()


def _ray_processes() -> set[psutil.Process]:
    names = {"raylet", "gcs_server"}
    return {process for process in psutil.process_iter() if process.name() in names}
