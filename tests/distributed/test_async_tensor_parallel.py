"""What the compiler makes of a divided block for `parallel.async_tp` computes the same numbers.

The compiler and its pass are the real ones. The operators that it puts in exchange and compute in
steps over NVLink, which no CPU can do; here they do what torch says that they must equal.
"""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed import _symmetric_memory

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.models.transformer import Transformer
from pipelines.parallel.async_tensor_parallel import Exchanges
from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import parallelize
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import Split
from pipelines.stages.train.train_layout import SettledLayout
from tests.benchmarks.contenders.our_trainer import build_trainer
from tests.benchmarks.loader import write_split
from tests.compiling import needs_a_linker
from tests.distributed.pool import Pool
from tests.settled import FP32

SHAPE = DecoderConfig(
    layers=2, width=32, heads=4, kv_heads=2, hidden=48, vocab_size=50, context_length=16
)


def built() -> Transformer:
    model = Transformer(SHAPE).double()
    model.init_weights(0)
    return model


def passes(model: torch.nn.Module, samples: int) -> Tensor:
    ids = torch.randint(50, (samples, 17), generator=torch.Generator().manual_seed(samples))
    nats: Tensor = model(ids[:, :-1], None, ids[:, 1:])
    nats.backward()
    return nats.detach()


def compiled(cache: Path, checkpointing: str) -> list[tuple[float, float, Exchanges, int]]:
    """How far loss and gradients are from one process's, the exchanges, and graphs that were not
    in the compiler's cache: of two samples, of one, and of one again.
    """
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    library.impl("fused_all_gather_matmul", _symmetric_memory._fused_all_gather_matmul_fallback)
    library.impl(
        "fused_matmul_reduce_scatter", _symmetric_memory._fused_matmul_reduce_scatter_fallback
    )
    mesh = build_mesh(Layout(tp=dist.get_world_size()), torch.device("cpu"))
    recipe = Recipe.model_validate(
        {
            "name": "overlapped",
            "parallel": {"tp": 2, "async_tp": True},
            "train": {
                "compile": True,
                "precision": "fp32",
                "activation_checkpoint": checkpointing,
            },
        }
    )
    found = []
    torch._dynamo.reset()
    # torch's pass does nothing in a build without NCCL.
    with (
        patch.object(dist, "is_nccl_available", lambda: True),
        torch._dynamo.config.patch(automatic_dynamic_shapes=False),  # a graph for each number
        patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": str(cache)}),
    ):
        for samples in (2, 1, 1):
            alone = built()
            missed = counters["inductor"]["fxgraph_cache_miss"]
            laid = parallelize(built(), mesh, recipe)
            gap = (passes(laid.parts[0], samples) - passes(alone, samples)).abs().item()
            pairs = zip(laid.parameters(), alone.parameters(), strict=True)
            furthest = max((p.grad.full_tensor() - q.grad).abs().max().item() for p, q in pairs)
            missed = counters["inductor"]["fxgraph_cache_miss"] - missed
            found.append((gap, furthest, Exchanges.compiled(), missed))
            torch._dynamo.reset()
    library._destroy()
    return found


@needs_a_linker
@pytest.mark.parametrize(
    ("checkpointing", "exchanges"),
    [
        ("none", Exchanges(6, 2)),
        pytest.param("selective", Exchanges(6, 4), marks=pytest.mark.parity),
        pytest.param("full", Exchanges(6, 2), marks=pytest.mark.parity),
    ],
)
def test_overlapped_exchanges_give_the_gradients_of_one_process(
    checkpointing: str, exchanges: Exchanges, pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    for each in pool(2).run(compiled, tmp_path, checkpointing, seconds=900):
        for gap, furthest, counted, _ in each:
            assert (gap, furthest) == pytest.approx((0, 0), abs=1e-12)
            assert counted == exchanges
        assert each[-1][3] == 0


def trained(folder: Path, split: Split) -> str:
    """What a run ends with."""
    counters.clear()
    torch._dynamo.reset()
    train = {"steps": 2, "micro_batch_size": 2, "global_batch_size": 2, "compile": True}
    sections = {"train": train, "parallel": {"tp": 2, "async_tp": True}}
    with patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": str(folder)}):
        trainer = build_trainer(folder, split, SHAPE, sections).trainer
        try:
            trainer.fit()
        except UserError as error:
            return str(error)
    return "no error"


@needs_a_linker
def test_a_run_ends_where_nothing_overlaps(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    """In a build of torch without NCCL, as this one, torch's pass does nothing."""
    split = write_split(tmp_path, 200, SHAPE.vocab_size)
    for line in pool(2).run(trained, tmp_path, split):
        assert line.startswith("parallel.async_tp: torch's compiler overlaps none of the 8 exchan")


def settled(folder: Path) -> str:
    """What a stage says before it makes a model."""
    values = {"parallel": {"tp": 2, "async_tp": True}, "train": FP32 | {"compile": True}}
    recipe = Recipe.model_validate({"name": "settled"} | values)
    try:
        SettledLayout(recipe, SHAPE, torch.device("cpu"), folder)
    except UserError as error:
        return str(error)
    return "no error"


def test_a_stage_that_can_not_overlap_ends_before_it_makes_a_model(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    for line in pool(2).run(settled, tmp_path):
        assert line.startswith("parallel.async_tp: it needs NVIDIA GPUs, but this is a CPU")
