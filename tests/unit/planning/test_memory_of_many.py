"""The formulas against the peak of one of eight processes whose exchanges are torch's fake ones.

The fake backend takes and gives memory as a real one does and sends nothing, so one process is
enough; DistributedDataParallel needs a real one.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipelines.models.config import DecoderConfig
from pipelines.parallel.layout import resolve_layout
from pipelines.planning.memory import estimate
from pipelines.recipe.recipe import Recipe
from tests.settled import FP32
from tests.unit.planning.training_step import peak_bytes, training_of

WORLD = 8
SHAPE = DecoderConfig(
    layers=6, width=256, heads=8, kv_heads=8, hidden=704, vocab_size=4096, context_length=256
)


@pytest.fixture
def fake_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    new_group = dist.new_group
    # Checkpoints, which aren't written here, want a group of gloo's.
    monkeypatch.setattr(dist, "new_group", lambda *ranks, backend=None, **rest: new_group(*ranks))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.usefixtures("fake_processes")
@pytest.mark.parametrize(
    ("parallel", "train"),
    [
        ({"dp_shard": 8, "sharding": "full"}, {"precision": "bf16"}),
        ({"dp_shard": 8, "sharding": "gradients"}, {"global_batch_size": 64}),
        ({"tp": 2, "dp_shard": 4, "sharding": "full"}, {"precision": "bf16"}),
        ({"tp": 8}, {"activation_checkpoint": "selective", "global_batch_size": 8}),
        ({"cp": 2, "dp_shard": 4, "sharding": "full"}, {}),
    ],
    ids=["zero-3", "zero-2-accumulating", "tp", "tp-selective-accumulating", "cp"],
)
def test_the_peak_of_one_of_many(parallel: dict, train: dict, tmp_path) -> None:
    sizes = {"micro_batch_size": 4, "global_batch_size": 4 * WORLD, "warmup_steps": 2}
    if "tp" in parallel or "cp" in parallel:
        sizes["global_batch_size"] = 4 * parallel.get("dp_shard", 1)
    recipe = Recipe.model_validate(
        {
            "name": "t",
            "data": {"sequence_length": 256},
            "parallel": parallel,
            "train": FP32 | sizes | train,
        }
    )
    layout = resolve_layout(recipe.parallel, WORLD)
    measured = peak_bytes(SHAPE, recipe, torch.device("cpu"), tmp_path, layout)
    predicted = estimate(SHAPE, training_of(recipe, on_cpu=True, layout=layout)).used
    assert predicted == pytest.approx(measured, rel=0.1)
