"""The sbatch script with the real Ray: three nodes with token and TLS, one job, and nothing left.

Slurm is the stub of the unit tests; the nodes are raylets of this machine, on the loopback. Under a
real Slurm, with a network for each node: tests/infra/test_slurm.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipelines.core.settings import PROJECT
from tests.integration.ray_cluster import RAY_ON_THE_LOOPBACK
from tests.unit.infra.test_slurm import SLURM, STUBS

JOB = """
import os, time, ray
ray.init(log_to_driver=False)
nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
where = ray.remote(lambda: ray.get_runtime_context().get_node_id())
spread = where.options(scheduling_strategy="SPREAD", num_cpus=1)
found, deadline = set(), time.monotonic() + 120
while found < nodes:
    assert time.monotonic() < deadline, found
    found |= set(ray.get([spread.remote() for _ in nodes]))
print("TLS:", os.environ["RAY_USE_TLS"], "computed on:", *sorted(found))
"""


@pytest.mark.parity
@pytest.mark.skipif(" " in sys.executable, reason="Ray's own commands take no such path")
def test_the_nodes_of_a_slurm_job_are_one_ray_cluster(tmp_path: Path) -> None:
    project = tmp_path / "project"
    stubs = tmp_path / "stubs"
    for folder in (project, stubs, tmp_path / "notes"):
        folder.mkdir()
    for name in ("scontrol", "squeue", "scancel", "srun"):
        (stubs / name).write_text(f"#!/usr/bin/env bash\n{STUBS[name]}\n")
    # The project's environment is this one, but for its `ray`.
    prefix, own = Path(sys.prefix), project / ".venv"
    (own / "bin").mkdir(parents=True)
    for path in ("lib", "pyvenv.cfg", "bin/python"):
        (own / path).symlink_to(prefix / path)
    (own / "bin" / "ray").write_text(f"#!{own}/bin/python\n{RAY_ON_THE_LOOPBACK}")
    for stub in (*stubs.iterdir(), own / "bin" / "ray"):
        stub.chmod(0o755)
    (project / "infra").symlink_to(PROJECT / "infra")
    (project / "job.py").write_text(JOB)
    environment = os.environ | {
        "PATH": f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(PROJECT),
        "PENSTOCK_HOME": str(tmp_path / "home"),
        "NOTES": str(tmp_path / "notes"),
        "PENSTOCK_RAY_INTERFACE": "lo",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "SLURM_SUBMIT_DIR": str(project),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost,node-1,node-2",  # they find the first by its name
        "SLURM_CPUS_ON_NODE": "1",
        "SLURM_GPUS_ON_NODE": "0",
    }
    command = ["bash", str(SLURM / "penstock.sbatch"), "python", "job.py"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("TLS:")]
    assert line.split()[1] == "1"
    assert len(set(line.partition("computed on:")[2].split())) == 3
    folder = f"/tmp/penstock-{environment['SLURM_JOB_ID']}"
    _, alive = psutil.wait_procs(_of_ray(folder), timeout=20)
    assert not alive
    assert not (tmp_path / "home" / "slurm" / environment["SLURM_JOB_ID"]).exists()
    assert not list(Path("/tmp").glob(f"{Path(folder).name}*"))


def _of_ray(folder: str) -> list[psutil.Process]:
    """What is left of the cluster, by the folder that its processes are given."""
    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        if process.info["name"] in {"raylet", "gcs_server"} and folder in words:
            found.append(process)
    return found
