"""Training on several hosts with slow links: the start, the step, and what the planner says of it.

Hosts are network namespaces of this machine. `torchrun` starts a process on each, by the address of
the first; `ray` starts a cluster on them, and a job on its head. A step's `exchange` is what it
takes longer than on links that are as fast as this machine copies; `planned` is the planner's time
for its bytes, which nothing hides. The planner knows of no delay. Every run must end with the
losses of one process.
"""

import json
import os
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from pipelines.core.settings import PROJECT
from pipelines.core.storage import write_json, write_text
from pipelines.models.presets import preset
from pipelines.parallel.layout import Layout
from pipelines.planning.communication import communication
from pipelines.planning.hardware_table import named
from pipelines.planning.memory_training import Training
from pipelines.recipe.recipe_files import dump_yaml, parse_recipe
from pipelines.run.progress import ProgressReader
from pipelines.stages.train.train_stage import CHECKPOINTS, HISTORY
from tests.benchmarks.local_platform import wait_until
from tests.hosts import Hosts
from tests.slow_network import Link, SlowHosts

LENGTH, MICRO_BATCH, BATCH = 64, 2, 12
STEPS, EVERY = 60, 10
RECIPE = {
    "name": "hosts",
    "data": {
        "source": {"kind": "stdlib", "max_documents": 60},
        "tokenizer": {"kind": "byte"},
        "sequence_length": LENGTH,
    },
    "model": {"preset": "llama-1m"},
    "train": {
        "steps": STEPS,
        "warmup_steps": 5,
        "micro_batch_size": MICRO_BATCH,
        "global_batch_size": BATCH,
        "log_every": EVERY,
        "precision": "fp32",
        "compile": False,
    },
}
GIGABIT = Link(125e6)
LINKS = {
    "this machine": None,
    "1 Gbit/s": GIGABIT,
    "1 Gbit/s, 1 ms": replace(GIGABIT, delay=0.001),
    "1 Gbit/s, 1 ms, 0.1 % lost": replace(GIGABIT, delay=0.001, loss=0.001),
}
SHARDINGS = ("none", "full")
PORT, LIMIT_S = 29_500, 300
_POINT = re.compile(r"step (\d+): loss [\d.]+, ([\d,]+) tokens/s")
_STARTED = "Ray runtime started"
_RAY_JOB = "tests.benchmarks.contenders.several_hosts_ray"


def main(results: Path, device: dict[str, Any], *, as_json: bool) -> int:
    """Measure each case, keep and show the figures."""
    rows: list[dict[str, Any]] = []
    if os.geteuid() != 0:
        raise SystemExit("several_hosts makes network namespaces, which root may only")
    with tempfile.TemporaryDirectory() as folder:
        expected = _losses_of_one(Path(folder))
        for number, sharding, way, name in _cases():
            sys.stderr.write(f"{way} on {number} hosts, sharding {sharding}, {name}\n")
            row = _measured(Path(folder), number, sharding, way, LINKS[name])
            start, step = row["start_seconds"], row["step_seconds"]
            sys.stderr.write(f"  start {start:.1f} s, step {step * 1e3:.0f} ms\n")
            worst = max(abs(a / b - 1) for a, b in zip(row.pop("losses"), expected, strict=True))
            if worst > 1e-4:
                raise SystemExit(f"the losses differ from one process's by {worst:.2g}")
            rows.append({"way": way, "hosts": number, "sharding": sharding, "link": name, **row})
    for row in rows:
        base = next(each for each in rows if _alike(each, row) and each["link"] == "this machine")
        row["exchange_seconds"] = row["step_seconds"] - base["step_seconds"]
    result = {
        "benchmark": "several_hosts",
        "command": "penstock bench several_hosts",
        "device": device,
        "links": {name: link and asdict(link) for name, link in LINKS.items()},
        "rows": rows,
    }
    write_json(results / "several_hosts.json", result)
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        Console().print(_table(rows))
    return 0


def _cases() -> Iterator[tuple[int, str, str, str]]:
    for number in (2, 3):
        for sharding in SHARDINGS:
            yield from ((number, sharding, "torchrun", link) for link in LINKS)
    for number in (2, 3):
        yield from ((number, "none", "ray", link) for link in LINKS)


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("way", "hosts", "sharding"))


def _measured(
    folder: Path, number: int, sharding: str, way: str, link: Link | None
) -> dict[str, Any]:
    """One run: seconds to its first step, of a step, and of what the planner says it sends."""
    recipe = folder / "recipe.yaml"
    write_text(recipe, dump_yaml(parse_recipe(_values(number, sharding))))
    workspace = _emptied(folder)
    with _hosts(number, link) as hosts, WAYS[way](hosts, recipe, workspace) as begin:
        seconds = _first_step(begin, workspace)
    return {
        "start_seconds": seconds,
        "step_seconds": _step_seconds(workspace / "log"),
        "planned_seconds": _planned(number, sharding, link) if link else 0.0,
        "losses": _losses(workspace),
    }


def _hosts(number: int, link: Link | None) -> Hosts:
    return SlowHosts(number, link) if link else Hosts(number, "fast", "10.79.0")


def _values(number: int, sharding: str) -> dict[str, Any]:
    return RECIPE | {"parallel": {"sharding": sharding}, "resources": {"workers": number}}


def _first_step(begin: Callable[[], subprocess.Popen[bytes]], workspace: Path) -> float:
    """Run to the end, and return the seconds to the first point of the progress file."""
    progress = ProgressReader(workspace)

    def has_stepped() -> bool:
        if process.poll():
            _fail(workspace)
        return any(each.stage == "train" and each.done >= 1 for each in progress.read())

    began = time.time()
    process = begin()
    seconds = wait_until(has_stepped, "the first step") - began
    if process.wait(LIMIT_S):
        _fail(workspace)
    return seconds


def _fail(workspace: Path) -> NoReturn:
    logs = sorted(workspace.glob("*log*"))
    raise SystemExit("\n".join(f"{each.name}:\n{each.read_text()[-2000:]}" for each in logs))


@contextmanager
def _torchrun(
    hosts: Hosts, recipe: Path, workspace: Path
) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    numbers = list(hosts.numbers)

    def begin() -> subprocess.Popen[bytes]:
        for host in numbers[1:]:
            hosts.start(host, command(host), _environment(), workspace / f"log-{host}")
        return hosts.start(1, command(1), _environment(), workspace / "log")

    def command(host: int) -> list[str]:
        meet = [f"--master-addr={hosts.address(1)}", f"--master-port={PORT}"]
        place = [f"--nnodes={len(numbers)}", f"--node-rank={host - 1}", "--nproc-per-node=1"]
        run = ["-m", "pipelines.training", "--recipe", str(recipe), "--workspace", str(workspace)]
        return [sys.executable, "-m", "torch.distributed.run", *place, *meet, *run]

    yield begin


@contextmanager
def _ray(
    hosts: Hosts, recipe: Path, workspace: Path
) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    token = workspace / "token"
    token.write_text(secrets.token_hex(32))
    head = f"{hosts.address(1)}:{PORT}"
    environment = _environment() | {
        "RAY_ADDRESS": head,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    for host in hosts.numbers:
        where = ["--head", f"--port={PORT}"] if host == 1 else [f"--address={head}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
        command += [f"--node-ip-address={hosts.address(host)}", "--disable-usage-stats", *where]
        log = workspace / f"ray-{host}.log"
        hosts.start(host, command, environment, log)
        # In turn: two that start at once here, where they share a disk, take the same socket.
        wait_until(lambda log=log: _STARTED in log.read_text(), f"Ray on host {host}")
    job = [sys.executable, "-m", _RAY_JOB]
    waits = [*job, str(len(hosts.numbers))]
    if hosts.start(1, waits, environment, workspace / "log").wait(LIMIT_S):
        _fail(workspace)
    trains = [*job, "--recipe", str(recipe), "--workspace", str(workspace)]
    yield lambda: hosts.start(1, trains, environment, workspace / "log")
    for host in hosts.numbers:
        hosts.kill(host)


WAYS = {"torchrun": _torchrun, "ray": _ray}


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}


def _emptied(folder: Path) -> Path:
    """The workspace with its data, and without what a run leaves."""
    workspace = folder / "run"
    shutil.rmtree(workspace, ignore_errors=True)
    data = folder / "data"
    if data.is_dir():
        shutil.copytree(data, workspace)
    return workspace


def _losses_of_one(folder: Path) -> list[float]:
    """Train in one process; what comes before training is kept for the others."""
    recipe, workspace = folder / "recipe.yaml", folder / "run"
    write_text(recipe, dump_yaml(parse_recipe(_values(1, "none"))))
    command = [sys.executable, "-m", "pipelines.training", "--recipe", str(recipe)]
    subprocess.run(
        [*command, "--workspace", str(workspace)],
        env=_environment(),
        check=True,
        capture_output=True,
    )
    shutil.copytree(workspace / "outputs" / "preprocess", folder / "data" / "outputs/preprocess")
    return _losses(workspace)


def _losses(workspace: Path) -> list[float]:
    lines = (workspace / CHECKPOINTS / HISTORY).read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def _step_seconds(log: Path) -> float:
    """The median step after the first points, in which memory is found and profiled."""
    points = _POINT.findall(log.read_text())
    rates = [float(rate.replace(",", "")) for step, rate in points if int(step) > 2 * EVERY]
    return BATCH * LENGTH / statistics.median(rates)


def _planned(number: int, sharding: str, link: Link) -> float:
    shape = preset("llama-1m").sized(256 + 3, LENGTH)
    hardware = replace(
        named("cpu"), network_bandwidth=link.rate, link_bandwidth=1e12, devices_per_node=1
    )
    training = Training(
        Layout(dp_replicate=number) if sharding == "none" else Layout(dp_shard=number),
        sharding,  # type: ignore[arg-type]
        MICRO_BATCH,
        BATCH // MICRO_BATCH // number,
        LENGTH,
    )
    sent = communication(shape, training, hardware, 1.0)
    return sent.weights + sent.gradients + sent.replicas


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="several_hosts", title_justify="left")
    for column in ("", "hosts", "sharding", "link", "start s", "step ms", "exchange", "planned"):
        table.add_column(column, justify="left" if column in ("", "sharding", "link") else "right")
    for row in rows:
        figures = [row[f"{name}_seconds"] * 1e3 for name in ("step", "exchange", "planned")]
        names = row["way"], str(row["hosts"]), row["sharding"], row["link"]
        table.add_row(*names, f"{row['start_seconds']:.1f}", *(f"{each:.0f}" for each in figures))
    return table
