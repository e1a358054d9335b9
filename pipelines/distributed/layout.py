"""How processes are arranged, in numbers; no torch here, so a bad one is refused at once."""

from dataclasses import astuple, dataclass
from math import prod

from pipelines.core.errors import UserError
from pipelines.core.recipe_training import Parallel


@dataclass(frozen=True)
class Layout:
    """Processes by dimension, the slowest varying first: neighbours are tensor parallel."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        """Processes in all."""
        return prod(astuple(self))

    @property
    def dp(self) -> int:
        """Processes that see samples of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_cp(self) -> int:
        """Processes that see tokens of their own: over them gradients are averaged."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Processes over which sharding divides; those of one sequence take part."""
        return self.dp_shard * self.cp

    def __str__(self) -> str:
        return " * ".join(f"{name}({size})" for name, size in vars(self).items())


def resolve_layout(parallel: Parallel, world: int) -> Layout:
    """The layout of `world` processes: an `auto` of data parallel takes what the others leave.

    Raises:
        UserError: the numbers do not multiply to `world`, or the sharding isn't for them.
    """
    if parallel.by_rule:
        raise ValueError("parallel: auto is resolved by planning before a mesh is made")
    sizes = {"pp": parallel.pp, "cp": parallel.cp, "tp": parallel.tp}
    sizes |= {"dp_replicate": parallel.dp_replicate, "dp_shard": parallel.dp_shard}
    # What is left goes to where the sharding wants it.
    if sizes["dp_shard"] == "auto" and parallel.sharding == "none":
        sizes["dp_shard"] = 1
    elif sizes["dp_replicate"] == sizes["dp_shard"] == "auto":
        sizes["dp_replicate"] = 1
    fixed = {name: size for name, size in sizes.items() if isinstance(size, int)}
    for name in sizes.keys() - fixed.keys():
        fixed[name] = max(1, world // prod(fixed.values()))
    layout = Layout(**fixed)
    if layout.world != world:
        raise UserError(f"parallel: {layout} = {layout.world} processes, but there are {world}")
    _check_sharding(layout, parallel)
    return layout


def _check_sharding(layout: Layout, parallel: Parallel) -> None:
    sharding = parallel.sharding
    if layout.dp_shard > 1 and sharding == "none":
        raise UserError(
            f"parallel.dp_shard({layout.dp_shard}) shards nothing with parallel.sharding = none; "
            "set optimizer, gradients or full, or use dp_replicate"
        )
    if sharding != "none" and layout.shards == 1 < layout.dp_replicate:
        raise UserError(
            f"parallel.sharding = {sharding}: dp_replicate({layout.dp_replicate}) leaves nothing "
            "to shard over; lower it, or set parallel.sharding = none"
        )
    if sharding == "optimizer" and layout.tp * layout.pp > 1:
        raise UserError(
            f"parallel.sharding = optimizer: not with parallel.tp({layout.tp}) * "
            f"parallel.pp({layout.pp}); set gradients or full, which need no more memory"
        )
    if parallel.cpu_offload and sharding not in ("gradients", "full"):
        raise UserError(
            f"parallel.cpu_offload: not with parallel.sharding = {sharding}; set gradients or full"
        )
