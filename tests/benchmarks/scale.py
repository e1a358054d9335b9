"""How parts grow with GPUs, tokens, shards and runs: each by its own code, at several sizes.

`PART=dvc penstock bench scale` measures some; their rows replace those of the results file.
docs/scale.md reads them. Nothing here is a race, so nothing is demanded: a row says what one size
cost, and beside it what that is worth.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from pipelines.core.storage import read_json, write_json

PART = "PART"
TOKENS, SEQUENCE = 10**13, 8192
TENSORS = 3 * 723  # of Llama 3 70B: its weights, and two of Adam's of each
FIGURES_A_NODE = 40  # that MLflow takes of a node of eight GPUs at a time
BLOCK = 5000  # documents of a key file
_LOAD_S = 10.0
_UP_LIMIT_S = 120.0


class Row(NamedTuple):
    """What one size of one part cost."""

    part: str
    size: int
    of: str
    seconds: float
    more: Mapping[str, float] = MappingProxyType({})


def main(results: Path, device: dict[str, Any], *, as_json: bool) -> int:
    """Measure the parts, keep and show them."""
    which = os.environ.get(PART, "")
    names = [name for name in PARTS if which in name]
    today = datetime.now(UTC).date().isoformat()
    rows = [
        row._asdict() | {"more": dict(row.more), "date": today}
        for name in names
        for row in PARTS[name]()
    ]
    path = results / "scale.json"
    kept = read_json(path)["rows"] if path.is_file() else []
    every = [row for row in kept if row["part"] not in names] + rows
    result = {
        "benchmark": "scale",
        "command": "penstock bench scale",
        "device": device,
        "rows": sorted(every, key=lambda row: (list(PARTS).index(row["part"]), row["size"])),
    }
    write_json(path, result)
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        Console().print(_table(rows))
    return 0


def sampler() -> Iterator[Row]:
    """One rank's samples of a step, of 10^13 tokens, each step at another place of the run."""
    from pipelines.loading.sampler import samples

    for gpus in (1, 100, 10_000):
        batch = max(2048, 2 * gpus)
        steps = [1_000_003 * number % (TOKENS // SEQUENCE // batch) for number in range(50)]

        def draw(batch: int = batch, gpus: int = gpus, steps: list[int] = steps) -> None:
            for step in steps:
                samples(1, step, gpus // 2, gpus, batch, TOKENS // SEQUENCE)

        yield Row("sampler", gpus, "GPUs", _seconds(draw) / len(steps))


def planner() -> Iterator[Row]:
    """`penstock plan`, the whole command: every layout of so many GPUs, ranked."""
    for gpus in (8, 64, 512, 4096, 10_240):
        command = ["penstock", "plan", "--model", "llama3-70b", "--gpus", str(gpus), "--json"]
        command[0] = str(Path(sys.executable).parent / "penstock")
        began = time.perf_counter()
        planned = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - began
        yield Row(
            "planner",
            gpus,
            "GPUs",
            seconds,
            {"layouts": len(json.loads(planned.stdout)["layouts"])},
        )


def checkpoint() -> Iterator[Row]:
    """What rank 0 does at each save, beside its own share: merge all ranks' plans, write them down.

    The plans are made up, of Llama 3 70B fully sharded over so many ranks; what merges them is
    PyTorch's own, as in a run.
    """
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

    for ranks in (8, 64, 256):
        plans = [_plan(rank, ranks) for rank in range(ranks)]
        began = time.perf_counter()
        _, metadata = create_default_global_save_plan(plans)
        size = len(pickle.dumps(metadata))
        yield Row("checkpoint", ranks, "ranks", time.perf_counter() - began, {"bytes": size})


def _plan(rank: int, ranks: int) -> Any:
    """The shards of one rank."""
    import torch
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    properties = TensorProperties(dtype=torch.float32)
    whole, rows = torch.Size([64 * ranks, 8192]), torch.Size([64, 8192])
    offset = torch.Size([64 * rank, 0])
    return SavePlan(
        [
            WriteItem(
                index=MetadataIndex(f"layers.{number}.weight", offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(offset, rows), properties, whole),
            )
            for number in range(TENSORS)
        ]
    )


def mlflow() -> Iterator[Row]:
    """A server on SQLite: how many batches of a node's system metrics it takes a second."""
    from pipelines.tracking.mlflow_client import call

    with _mlflow_server():
        experiment = call("POST", "experiments/create", {"name": "scale"})["experiment_id"]
        run = call("POST", "runs/create", {"experiment_id": experiment})["run"]["info"]["run_id"]
        for nodes in (1, 4, 16):
            counts = [0] * nodes
            end = time.perf_counter() + _LOAD_S

            def tell(node: int, counts: list[int] = counts, end: float = end) -> None:
                while time.perf_counter() < end:
                    stamp = int(time.time() * 1000)
                    metrics = [
                        {
                            "key": f"system/node-{node}/{n}",
                            "value": 1.0,
                            "timestamp": stamp,
                            "step": counts[node],
                        }
                        for n in range(FIGURES_A_NODE)
                    ]
                    call("POST", "runs/log-batch", {"run_id": run, "metrics": metrics})
                    counts[node] += 1

            threads = [threading.Thread(target=tell, args=(node,)) for node in range(nodes)]
            began = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rate = sum(counts) / (time.perf_counter() - began)
            yield Row("mlflow", nodes, "writers", 1 / rate, {"batches_a_second": rate})


@contextmanager
def _mlflow_server() -> Iterator[None]:
    """On the loopback, as `penstock up` starts it; the environment names it."""
    import httpx

    from pipelines.core.machine import free_port

    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}"]
        command += ["--workers=1", "--no-serve-artifacts", "--backend-store-uri"]
        command += [
            f"sqlite:///{folder}/mlflow.db",
            "--default-artifact-root",
            f"{folder}/artifacts",
        ]
        with (Path(folder) / "log").open("w") as log:
            server = subprocess.Popen(
                command,
                env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        before = os.environ.get("MLFLOW_TRACKING_URI")
        os.environ["MLFLOW_TRACKING_URI"] = url
        try:
            deadline = time.monotonic() + _UP_LIMIT_S
            while not _answers(f"{url}/health", httpx):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit((Path(folder) / "log").read_text()[-2000:])
                time.sleep(0.5)
            yield
        finally:
            os.environ.pop("MLFLOW_TRACKING_URI")
            if before is not None:
                os.environ["MLFLOW_TRACKING_URI"] = before
            os.killpg(server.pid, 15)
            server.wait()


def _answers(url: str, httpx: Any) -> bool:
    try:
        return bool(httpx.get(url, trust_env=False).is_success)
    except httpx.TransportError:
        return False


def dvc() -> Iterator[Row]:
    """A dataset version of so many shards: hashed, and pushed to a remote that has none of it."""
    from pipelines.datasets.dvc_objects import ObjectStore, hash_folder

    for shards in (1_000, 10_000, 100_000):
        with tempfile.TemporaryDirectory() as folder:
            data, remote = Path(folder) / "data", Path(folder) / "remote"
            data.mkdir()
            for number in range(shards):  # small: what is asked is the cost of their number
                (data / f"{number:06}.bin").write_bytes(number.to_bytes(4, "little"))
            began = time.perf_counter()
            tree = hash_folder(data)
            hashed = time.perf_counter()
            store = ObjectStore(str(remote))
            store.push(tree)
            pushed = time.perf_counter()
            store.push(hash_folder(data))
            again = time.perf_counter() - pushed
            more = {"hash_seconds": hashed - began, "again_seconds": again}
            yield Row("dvc", shards, "shards", pushed - began, more)


def dedup() -> Iterator[Row]:
    """One partition of the search for near duplicates, over the key files of so many documents.

    All partitions take so long each, and each opens every block's file: their number grows with the
    documents, and so does that of the blocks.
    """
    from pipelines.data.duplicates.deduplication import match_partition, partitions_for
    from pipelines.recipe.cleaning_section import Dedup

    dedup = Dedup(kind="minhash")
    for blocks in (10, 50, 200):
        documents = blocks * BLOCK
        with tempfile.TemporaryDirectory() as name:
            files = [_key_file(Path(name) / f"keys-{block}", block) for block in range(blocks)]
            partitions = partitions_for(documents, dedup)
            began = time.perf_counter()
            match_partition(
                0, partitions=partitions, key_files=files, dedup=dedup, folder=Path(name)
            )
            seconds = time.perf_counter() - began
            size = sum(file.stat().st_size for file in files)
        more = {"partitions": partitions, "blocks": blocks, "key_bytes": size}
        yield Row("dedup", documents, "documents", seconds, more)


def _key_file(path: Path, block: int) -> Path:
    """Of documents that have nothing in common, as most have."""
    import numpy as np

    from pipelines.data.duplicates.duplicate_keys import (
        EXACT,
        ID_BYTES,
        NEAR,
        KeyTable,
        write_tables,
    )
    from pipelines.data.duplicates.minhash import bands, sketches
    from pipelines.recipe.cleaning_section import Dedup

    shape = Dedup(kind="minhash")
    rng = np.random.default_rng(block)

    def table(keys: int, features: Any) -> KeyTable:
        drawn = rng.integers(0, 2**64, (BLOCK, keys), dtype=np.uint64)
        return KeyTable.build(drawn, features)

    signatures = rng.integers(0, 2**32, (BLOCK, shape.permutations), dtype=np.uint32)
    exact = rng.integers(0, 256, (BLOCK, ID_BYTES), dtype=np.uint8)
    count = bands(shape.permutations, shape.jaccard)[0]
    write_tables(path, {EXACT: table(1, exact), NEAR: table(count, sketches(signatures))})
    return path


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "sampler": sampler,
    "planner": planner,
    "checkpoint": checkpoint,
    "mlflow": mlflow,
    "dvc": dvc,
    "dedup": dedup,
}


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("part", "size", "seconds", "", title="scale", title_justify="left")
    for row in rows:
        more = ", ".join(f"{name} {value:,.4g}" for name, value in row["more"].items())
        table.add_row(row["part"], f"{row['size']:,} {row['of']}", f"{row['seconds']:.4g}", more)
    return table
