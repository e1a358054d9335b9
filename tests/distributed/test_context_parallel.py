"""Context parallelism gives every family the loss and the gradients of one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pipelines.models import loss
from pipelines.parallel.context_parallel import (
    Arrival,
    context_parallel,
    start_to_heads,
    to_sequence,
)
from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh
from tests.distributed.pool import Pool
from tests.distributed.test_tensor_parallel import MODELS, built, passes
from tests.distributed.training import Case, losses, make_data


def exchanged() -> tuple[bool, bool]:
    """Whether each process has the whole sequence of its heads, and gets its own part back."""
    rank, world = dist.get_rank(), dist.get_world_size()
    line = build_mesh(Layout(cp=world), torch.device("cpu")).line("cp")
    whole = torch.arange(3 * 2 * world * 4 * world).view(3, 2 * world, 4 * world).float()
    mine = whole.chunk(world, dim=1)[rank]
    heads = Arrival(line)(start_to_heads(mine, line))
    return torch.equal(heads, whole.chunk(world, dim=2)[rank]), torch.equal(
        to_sequence(heads, line), mine
    )


def test_parts_of_the_sequence_are_exchanged_for_parts_of_the_heads(
    pool: Callable[[int], Pool],
) -> None:
    assert pool(2).run(exchanged) == [(True, True)] * 2


class Order(TorchDispatchMode):
    """What is done in which order: products, and starts and ends of exchanges."""

    NAMES: ClassVar = {"mm": "product", "all_to_all_single": "start", "wait_tensor": "wait"}

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):  # type: ignore[no-untyped-def]
        name = operation.overloadpacket.__name__
        if name in self.NAMES:
            self.seen.append(self.NAMES[name])
        return operation(*arguments, **(named or {}))


def order() -> tuple[list[str], list[str]]:
    """Of one layer's attention, forwards and backwards."""
    line = build_mesh(Layout(cp=2), torch.device("cpu")).line("cp")
    config = replace(MODELS["llama"], layers=1)
    divided = built(config)
    context_parallel(divided, line)
    attention = divided.layers["0"].self_attn
    x = torch.randn(1, 8, config.width, dtype=torch.float64, requires_grad=True)
    with Order() as forward:
        out = attention(x, divided.rotary_2SR.double(), None)
    with Order() as backward:
        out.sum().backward()
    return forward.seen, backward.seen


def test_exchanges_are_on_their_way_while_products_are_computed(
    pool: Callable[[int], Pool],
) -> None:
    forward, backward = pool(2).run(order)[0]
    before, arrival, after = ["product", "start"] * 3, ["wait"] * 3, ["start", "wait", "product"]
    assert forward == before + arrival + after
    of_output = ["product", "product", "start", "wait"]
    assert backward == of_output + ["start"] * 3 + ["wait", "product", "product"] * 3


def distances(chunk: int | None) -> dict[str, tuple[float, float]]:
    """Of each model's loss and gradients, summed over processes, from those of the model alone."""
    line = build_mesh(Layout(cp=dist.get_world_size()), torch.device("cpu")).line("cp")
    usual, loss.CHUNK = loss.CHUNK, chunk or loss.CHUNK
    found = {}
    for name, config in MODELS.items():
        alone, divided = built(config), built(config)
        context_parallel(divided, line)
        nats = passes(divided, config.vocab_size)
        dist.all_reduce(nats)
        gap = nats - passes(alone, config.vocab_size)
        furthest = 0.0
        for ours, theirs in zip(divided.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(ours.grad)
            furthest = max(furthest, (ours.grad - theirs.grad).abs().max().item())
        found[name] = (abs(gap.item()), furthest)
    loss.CHUNK = usual
    return found


@pytest.mark.parametrize(
    ("world", "chunk"),
    [
        pytest.param(2, None, id="2"),
        pytest.param(2, 300, id="2, loss in chunks", marks=pytest.mark.parity),
        pytest.param(4, None, id="4, more than key-value heads", marks=pytest.mark.parity),
    ],
)
def test_every_family_has_the_gradients_of_one_process(
    world: int, chunk: int | None, pool: Callable[[int], Pool]
) -> None:
    for found in pool(world).run(distances, chunk):
        assert found.keys() == MODELS.keys()
        for name, (nats, gradient) in found.items():
            assert (nats, gradient) == pytest.approx((0, 0), abs=1e-12), name


@pytest.mark.parity
@pytest.mark.parametrize("world", [2, 4])
def test_each_target_weighs_the_same_in_whichever_part_it_is(
    world: int, pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    data = tmp_path, make_data(tmp_path, masked=True)
    case = Case("cp", world, {"cp": 2}, {"steps": 6, "micro_batch_size": 2})
    expected = losses(case, data, tmp_path / "alone", torch.float64)
    for found in pool(world).run(losses, case, data, tmp_path / "parts", torch.float64):
        assert found == [pytest.approx(point, rel=1e-10) for point in expected]
