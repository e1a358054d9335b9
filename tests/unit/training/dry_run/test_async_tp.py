"""torch's pass finds the exchanges of a real block, on GPUs that don't exist."""

import json
import os
import subprocess
import sys

import pytest

from tests.unit.training.dry_run.dry_run_cases import AGAIN, FEW, FULL, LORA, SELECTIVE, Tried

ASYNC = {"tp": 4, "async_tp": True}
SHARDED = FULL | {"tp": 2, "dp_shard": 2, "async_tp": True}
ONE_SAMPLE = FEW | SELECTIVE
# Two gathers and two scatters in each pass. The backward pass adds products before it scatters
# their sum; with selective checkpointing it also gathers twice again.
FORWARD, BACKWARD, AGAIN_GATHERED = [False, 4, 0], [True, 2, 2], [True, 2, 4]
# An adapter has an exchange of its own beside each scatter, as thin as its rank. The first block
# has no gradient to send on.
FORWARD_LORA, BACKWARD_LORA, LAST_LORA = [False, 6, 0], [True, 4, 2], [True, 4, 1]


@pytest.mark.parametrize(
    ("tried", "graphs"),
    [
        pytest.param(Tried(4, ASYNC), [FORWARD, BACKWARD], id="samples"),
        pytest.param(
            Tried(4, SHARDED, ONE_SAMPLE),
            [FORWARD, AGAIN_GATHERED],
            id="a sample",
            marks=pytest.mark.parity,
        ),
        pytest.param(
            Tried(4, ASYNC, AGAIN), [FORWARD, BACKWARD], id="full", marks=pytest.mark.parity
        ),
        pytest.param(
            Tried(4, ASYNC | {"tp": 2, "cp": 2}),
            [FORWARD, BACKWARD],
            id="context",
            marks=pytest.mark.parity,
        ),
        pytest.param(
            Tried(4, ASYNC | {"tp": 2, "pp": 2}),
            [FORWARD, BACKWARD],
            id="pipeline",
            marks=pytest.mark.parity,
        ),
        pytest.param(
            Tried(4, ASYNC, adapter=LORA),
            [FORWARD_LORA, FORWARD_LORA, BACKWARD_LORA, LAST_LORA],
            id="lora",
            marks=pytest.mark.parity,
        ),
    ],
)
def test_a_blocks_exchanges_overlap(tried: Tried, graphs: list[list[int]]) -> None:
    compiled = Tried(tried.world, tried.parallel, tried.train | {"compile": True}, tried.adapter)
    case, _ = compiled.laid()
    ended = subprocess.run(
        [sys.executable, "-m", "tests.unit.training.dry_run.async_tp_graphs"],
        input=case.to_json(),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert json.loads(ended.stdout.splitlines()[-1]) == graphs
