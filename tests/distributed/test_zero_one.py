"""ZeRO's stage 1 on shapes that don't divide, against the same update of whole parameters."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pipelines.parallel import data_parallel
from pipelines.parallel.data_parallel import ShardedUpdate
from tests.distributed.pool import Pool

SHAPES = {"odd": (5, 3), "one-row": (1, 4), "vector": (7,), "double": (6, 2)}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    made["double"] = made["double"].double()
    return {name: nn.Parameter(tensor) for name, tensor in made.items()}


def step(whole: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for parameter in whole.values():
        parameter.grad = parameter.detach().sin()
    optimizer.step()


def differences(bucket: int) -> list[float]:
    """How far each parameter is from the update of one process, after some steps."""
    data_parallel._BUCKET = bucket
    whole, expected = parameters(), parameters()
    update = ShardedUpdate(whole, init_device_mesh("cpu", (dist.get_world_size(),)))
    sharded = torch.optim.AdamW(update.shards.values(), fused=True)
    update.attach(sharded)
    plain = torch.optim.AdamW(expected.values(), fused=True)
    for _ in range(3):
        step(whole, sharded)
        step(expected, plain)
    assert all(shard.grad is None for shard in update.shards.values())
    return [float((whole[name] - expected[name]).abs().max().detach()) for name in SHAPES]


def test_the_update_is_that_of_one_process(pool: Callable[[int], Pool]) -> None:
    for bucket in (1, 1 << 26):
        for found in pool(2).run(differences, bucket):
            assert found == [0.0] * len(SHAPES)
