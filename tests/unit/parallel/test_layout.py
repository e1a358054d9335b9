import pytest

from pipelines.core.errors import UserError
from pipelines.parallel.layout import Layout, check_places, resolve_layout
from pipelines.recipe.training_section import Parallel


@pytest.mark.parametrize(
    ("parallel", "world", "layout"),
    [
        ({}, 1, Layout()),
        ({}, 6, Layout(dp_replicate=6)),
        ({"sharding": "full"}, 6, Layout(dp_shard=6)),
        ({"sharding": "full", "dp_shard": 2}, 6, Layout(dp_replicate=3, dp_shard=2)),
        ({"sharding": "full", "dp_replicate": 2}, 6, Layout(dp_replicate=2, dp_shard=3)),
        ({"sharding": "full", "tp": 2, "pp": 2}, 16, Layout(pp=2, dp_shard=4, tp=2)),
        ({"tp": 2}, 8, Layout(dp_replicate=4, tp=2)),
        ({"cp": 2, "tp": 2}, 8, Layout(dp_replicate=2, cp=2, tp=2)),
        ({"cp": 2, "sharding": "full"}, 8, Layout(dp_shard=4, cp=2)),
        ({"cp": 2, "sharding": "full", "dp_replicate": 4}, 8, Layout(dp_replicate=4, cp=2)),
    ],
)
def test_auto_takes_what_the_others_leave(parallel: dict, world: int, layout: Layout) -> None:
    assert resolve_layout(Parallel.model_validate(parallel), world) == layout
    assert layout.world == world


@pytest.mark.parametrize(
    ("parallel", "world", "line"),
    [
        ({"tp": 3}, 4, r"tp\(3\) = 3 processes, but there are 4"),
        ({"cp": 3}, 4, r"cp\(3\) \* tp\(1\) = 3 processes, but there are 4"),
        ({"tp": 4, "pp": 4}, 8, r"pp\(4\) .* tp\(4\) = 16 processes, but there are 8"),
        ({"dp_replicate": 2, "tp": 2}, 8, "= 4 processes, but there are 8"),
        ({"dp_shard": 2}, 2, r"dp_shard\(2\) shards nothing with parallel\.sharding = none"),
        ({"sharding": "full", "dp_replicate": 2}, 2, r"dp_replicate\(2\) leaves nothing"),
        ({"sharding": "optimizer", "tp": 2}, 4, r"optimizer: not with parallel\.tp\(2\)"),
        ({"async_tp": True}, 2, r"async_tp: with parallel\.tp\(1\) there is nothing to exchange"),
        (
            {"async_tp": True, "tp": 2, "sequence_parallel": False},
            2,
            "async_tp: not with parallel.sequence_parallel = false",
        ),
        ({"cpu_offload": True}, 2, "cpu_offload: not with parallel.sharding = none"),
        ({"reduce_dtype": "bf16", "pp": 2}, 2, r"reduce_dtype = bf16: not with parallel\.pp\(2\)"),
        (
            {"reduce_dtype": "bf16", "sharding": "full", "dp_replicate": 2, "dp_shard": 2},
            4,
            r"nor with replicas\(2\) of shards",
        ),
        ({"reduce_dtype": "bf16", "tp": 2, "cp": 2}, 4, r"nor with replicas\(2\) of shards"),
    ],
)
def test_an_impossible_layout_is_refused_with_its_numbers(
    parallel: dict, world: int, line: str
) -> None:
    with pytest.raises(UserError, match=line):
        resolve_layout(Parallel.model_validate(parallel), world)


def test_a_rule_is_not_a_layout() -> None:
    with pytest.raises(ValueError, match="resolved by planning"):
        resolve_layout(Parallel.model_validate("auto"), 4)


def test_async_tp_needs_gpus_that_share_a_host() -> None:
    hosts = ["a", "a", "a", "b", "b", "b", "b", "b"]
    check_places(Layout(dp_shard=4, tp=2), "cuda", ["a"] * 4 + ["b"] * 4)
    with pytest.raises(UserError, match=r"processes 2 to 3 of parallel\.tp\(2\) .* on a and b"):
        check_places(Layout(dp_shard=4, tp=2), "cuda", hosts)
    with pytest.raises(UserError, match="needs NVIDIA GPUs, but this is a CPU"):
        check_places(Layout(tp=2), "cpu", ["a", "a"])
