"""Catches what hardware computes or keeps wrong without an error (silent data corruption).

Every some steps, each process also runs a micro-batch of another one, and the bits of the loss and
of the gradient, before replicas exchange it, are compared. Where they differ, the step is run again
before the optimizer has seen it. Replicas compare the bits of their weights and moments, too, and
before each checkpoint; where these differ, the run goes back to the newest one. How often hardware
is wrong in silence: Dixit et al. 2021, "Silent Data Corruptions at Scale".
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from typing_extensions import override

from pipelines.core.errors import SharedError
from pipelines.loading.dataloader import Batch
from pipelines.models.weights import local
from pipelines.parallel.data_parallel import is_fully_sharded
from pipelines.parallel.parallelize import Parallelized
from pipelines.parallel.process_group import from_all
from pipelines.recipe.recipe import Recipe
from pipelines.training.forward_backward import seed_step
from pipelines.training.hooks import Events, Hook
from pipelines.training.machines import Machines
from pipelines.training.preemption import PreemptedError
from pipelines.training.stragglers import hardware_kind, hardware_name
from pipelines.training.wrong_ranks import Statement, Wrong, find_wrong, is_disputed

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PASSES = "loss", "gradient"
_STATE = "weights", "moments"

_log = logging.getLogger(__name__)

Batches = Iterable[tuple[Batch, bool]]
Passes = Callable[[Batches], Tensor]


class _Step(NamedTuple):
    number: int
    passes: Passes
    routes: list[tuple[Tensor, Tensor]]  # what routers count, and its values before the step


class Corruption(Hook):
    """Compares bits between the processes of a run; all of them call the same methods.

    Attributes:
        every: Steps from one check to the next. A check takes about a micro-batch, which is at
            most a whole step: half a percent of 200 steps, or less.
        machines: Where the processes are; set before training begins. The one that is surely wrong
            leaves its machine before the run ends for it.
    """

    every = 200

    def __init__(
        self, recipe: Recipe, model: Parallelized, optimizer: Optimizer, events: Events
    ) -> None:
        """`model` and `optimizer` are compared; rank 0 notes in `events` who is wrong."""
        self._recipe, self._model, self._optimizer = recipe, model, optimizer
        self._events = events
        self._mesh, self._layout = model.mesh, model.mesh.layout
        sharded = is_fully_sharded(model.mesh, recipe.parallel)
        copies = ["dp_replicate"] if sharded else ["dp_replicate", "dp_shard", "cp"]
        if sharded and recipe.parallel.sharding == "none":
            copies.append("cp")
        self._has_copies = any(getattr(self._layout, name) > 1 for name in copies)
        self._first_copy = self._rank_at(**dict.fromkeys(copies, 0))
        on_cpu, train = model.mesh.device.type == "cpu", recipe.train
        # On a GPU, Inductor times kernels and takes the fastest, so processes may differ in them.
        self._have_same_kernels = on_cpu or not train.fixed_compile
        self._is_exact = on_cpu or (train.deterministic and self._have_same_kernels)
        # Whether passes give the same bits each time; None: that is yet to be tried.
        self._repeats = True if self._is_exact else None
        self._off = self._why_off(sharded=sharded)
        self.machines = Machines()
        self._names: list[str] = []
        self._named: set[int] = set()

    def _why_off(self, *, sharded: bool) -> str:
        """Return why another process can't run the same passes, or nothing."""
        layout, train = self._layout, self._recipe.train
        if layout.pp > 1 or self._recipe.parallel.ep > 1:
            return "a pipeline's stages and divided experts work on several micro-batches at once"
        if self._recipe.preference.kind != "none" or self._recipe.reinforcement.is_on:
            return "the loss of preferences and rewards remembers earlier passes"
        share, rest = divmod(train.global_batch_size, layout.dp)
        if rest and share < train.fixed_micro_batch_size:
            return "the processes' first micro-batches differ in size"
        if sharded and train.fixed_precision == "fp8":
            return "weights are gathered in fp8"
        return ""

    @override
    def begin_training(self, step: int) -> None:
        """Meet the others, and say in the log what is not compared."""
        met = from_all((hardware_name(self._mesh), hardware_kind(self._mesh.device)))
        self._names = [name for name, _ in met]
        kinds = sorted({kind for _, kind in met})
        if len(kinds) > 1 and not self._off:
            self._off = f"{' and '.join(kinds)} need not round alike"
        if self._off:
            self._say_off(self._off)

    def _say_off(self, reason: str) -> None:
        if self._mesh.rank == 0:
            _log.info("silent corruption: passes are not compared: %s", reason)

    def is_due(self, step: int) -> bool:
        """Return whether a step, counted from 0, is checked."""
        return step % self.every == self.every - 1

    def forward_backward(self, step: int, batches: Batches, passes: Passes) -> Tensor:
        """Return what `passes`, forward and backward, return of a step; check it if that is due.

        Raises:
            SharedError: a process got wrong bits again and again.
        """
        if self._off or not self.is_due(step):
            return passes(batches)
        held = list(batches)
        routers = (each for part in self._model.modules for each in part.routers.values())
        checked = _Step(step, passes, [(each.routes_E, each.routes_E.clone()) for each in routers])
        if self._repeats is None:
            self._repeats = self._try_twice(checked, held[0][0])
        if not self._repeats:
            self._seed(step, self._mesh.dp_rank)
            return passes(held)
        nats, first = self._round(checked, held, 1)
        if is_disputed(first):
            self._forget(checked)
            # Other witnesses than before, where there are three processes.
            nats, second = self._round(checked, held, min(2, self._layout.dp - 1))
            self._judge(step, first, second)
        return nats

    def _try_twice(self, checked: _Step, batch: Batch) -> bool:
        """Return whether every process gets the same bits twice."""
        one, other = (self._run_again(checked, batch, self._mesh.dp_rank) for _ in range(2))
        repeats = all(from_all(torch.equal(one, other)))
        if not repeats:
            self._say_off("they give other bits each time here; set train.deterministic = true")
        return repeats

    def _round(
        self, checked: _Step, batches: list[tuple[Batch, bool]], shift: int
    ) -> tuple[Tensor, list[Statement]]:
        """Run the step, and before it the first micro-batch of the process `shift` places before;
        return what `passes` returns of it, and what all processes say.
        """
        owner = (self._mesh.dp_rank - shift) % self._layout.dp
        theirs = self._run_again(checked, self._exchanged(batches[0][0], shift), owner)
        mine = torch.zeros_like(theirs)
        self._seed(checked.number, self._mesh.dp_rank)
        nats = checked.passes(self._watched_first(batches, mine))
        return nats, [
            *self._say(_PASSES, self._at_dp(owner), theirs),
            *self._say(_PASSES, self._mesh.rank, mine),
        ]

    def _seed(self, step: int, dp_rank: int) -> None:
        token_rank = dp_rank * self._layout.cp + self._mesh.coordinate("cp")
        seed_step(self._recipe.seed, step, token_rank)

    def _run_again(self, checked: _Step, batch: Batch, owner: int) -> Tensor:
        """Return the bits of loss and gradient, [2], of a micro-batch of a data-parallel rank, and
        leave everything else as it was before the step.
        """
        found = torch.zeros(len(_PASSES), dtype=torch.int64, device=self._mesh.device)
        self._seed(checked.number, owner)
        sharded = isinstance(self._model.parts[0], FSDPModule)  # each backward pass exchanges
        with self._watching(found, keeps=sharded):
            checked.passes([(batch, sharded)])
        self._forget(checked)
        return found

    def _forget(self, checked: _Step) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None
        for counts, before in checked.routes:
            counts.copy_(before)

    def _watched_first(self, batches: Batches, found: Tensor) -> Iterator[tuple[Batch, bool]]:
        """Yield the micro-batches; the bits of the first one are added to `found`."""
        rest = iter(batches)
        with self._watching(found, keeps=True):
            yield next(rest)
        yield from rest

    @contextmanager
    def _watching(self, found: Tensor, *, keeps: bool) -> Iterator[None]:
        """Add the bits of the loss, and of gradients before they are exchanged, to `found`."""

        def add_loss(_module: nn.Module, _inputs: object, loss: Tensor) -> None:
            found[0] += bits(loss)

        def add_gradient(gradient: Tensor) -> None:
            found[1] += bits(gradient)

        def drop(parameter: Tensor) -> None:
            parameter.grad = None

        (part,) = self._model.parts
        leaves = [each for each in self._leaves(part) if each.requires_grad]
        handles = [part.register_forward_hook(add_loss)]
        handles += [each.register_hook(add_gradient) for each in leaves]  # type: ignore[no-untyped-call]
        if not keeps:
            # One by one, so that they take no memory together.
            handles += [each.register_post_accumulate_grad_hook(drop) for each in leaves]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _leaves(self, part: nn.Module) -> Iterator[Tensor]:
        """Yield what gradients are computed of: FSDP2 puts whole weights in the place of shards."""
        if not isinstance(part, FSDPModule):
            yield from self._model.parameters()
            return
        for module in (each for each in part.modules() if isinstance(each, FSDPModule)):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if not all(hasattr(each, "_unsharded_param") for each in group.fsdp_params):
                    module.unshard()  # the first time makes them
                    module.reshard()
                yield from (each._unsharded_param for each in group.fsdp_params)

    def _exchanged(self, batch: Batch, shift: int) -> Batch:
        """Give the micro-batch to the process so many places on; return one from as far back, which
        lies in memory as this one does, as compiled code depends on that.
        """
        mine, dp = self._mesh.dp_rank, self._layout.dp
        giver, taker = self._at_dp((mine - shift) % dp), self._at_dp((mine + shift) % dp)
        if giver == self._mesh.rank:
            return batch
        ours = {name: each for name, each in batch._asdict().items() if each is not None}
        sent = [each.contiguous() for each in ours.values()]
        taken = [torch.empty_like(each) for each in sent]
        ways = [dist.P2POp(dist.isend, each, taker) for each in sent]
        ways += [dist.P2POp(dist.irecv, each, giver) for each in taken]
        for work in dist.batch_isend_irecv(ways):
            work.wait()
        theirs = {
            name: each.new_empty_strided(each.shape, each.stride()).copy_(given)
            for (name, each), given in zip(ours.items(), taken, strict=True)
        }
        return batch._replace(**theirs)

    def _at_dp(self, dp_rank: int) -> int:
        shards = self._layout.dp_shard
        return self._rank_at(dp_replicate=dp_rank // shards, dp_shard=dp_rank % shards)

    def _rank_at(self, **places: int) -> int:
        """Return the rank whose place differs from this one's in some dimensions of the mesh."""
        rank = 0
        for name, size in vars(self._layout).items():
            rank = rank * size + places.get(name, self._mesh.coordinate(name))
        return rank

    def _say(self, what: tuple[str, ...], of: int, sums: Tensor) -> list[Statement]:
        """Return what all processes say; here the host waits for the device.

        `sums` are this process's, of the bits of each of `what`, which belongs to the rank `of`.
        """
        rows = mine = torch.cat((torch.tensor([of], device=sums.device), sums))
        if self._layout.world > 1:
            rows = mine.new_empty(self._layout.world * len(mine))
            dist.all_gather_single(rows, mine)
        return [
            Statement(name, owner, rank, number)
            for rank, (owner, *numbers) in enumerate(rows.view(-1, len(mine)).tolist())
            for name, number in zip(what, numbers, strict=True)
        ]

    def _judge(self, step: int, *rounds: list[Statement]) -> None:
        """Name who is wrong; end the run if the step can't be run so that all agree."""
        wrong = find_wrong(rounds)
        lasts = is_disputed(rounds[-1])
        is_sure = wrong.is_known and len(wrong.ranks) == 1 and self._layout.dp > 2
        if lasts and not self._is_exact and not (is_sure and self._have_same_kernels):
            self._repeats = False
            why = "set train.deterministic = true" if self._have_same_kernels else "kernels differ"
            self._say_off(f"processes do not give the same bits; {why}")
            return
        # Kernels that may round otherwise once in a while must not end a run.
        ends = lasts or (self._is_exact and self.was_wrong(wrong))
        self.tell(step, wrong, "the step was run again, and all agreed", ends=ends)

    @torch.no_grad()
    def differing(self) -> Wrong | None:
        """Return who has other weights or moments than its replicas, if anybody has."""
        if not self._has_copies:
            return None
        moments: list[Tensor] = []
        if not self._model.shards_update:  # then replicas have different ones
            states = (self._optimizer.state.get(one, {}) for one in self._model.trained().values())
            moments = [each for state in states for each in state.values()]
        # What is paged waits on the host, where a look at it takes too long.
        moments = [each for each in moments if local(each).device == self._mesh.device]
        sums = torch.zeros(len(_STATE), dtype=torch.int64, device=self._mesh.device)
        for place, tensors in enumerate((self._model.changed().values(), moments)):
            for each in tensors:
                sums[place] += bits(each).to(sums.device)
        said = self._say(_STATE, self._first_copy, sums)
        return find_wrong([said]) if is_disputed(said) else None

    def was_wrong(self, wrong: Wrong) -> bool:
        """Return whether one of them was wrong before."""
        return not self._named.isdisjoint(wrong.ranks)

    def tell(
        self, step: int, wrong: Wrong, done: str, *, ends: bool = False, lost: float | None = None
    ) -> None:
        """Log and note who is wrong, and what was done about it, with the seconds that were lost.

        Raises:
            PreemptedError: the run ends, as `ends` says, and goes on on other machines.
            SharedError: it ends, and does not.
        """
        names = [f"rank {rank} on {self._names[rank]}" for rank in wrong.ranks]
        who = (" and " if wrong.is_known else " or ").join(names)
        cause = (
            f"silent corruption at step {step}: wrong bits in {' and '.join(wrong.what)} of {who}"
        )
        if self.was_wrong(wrong):
            cause = f"{cause}, and not for the first time"
        self._named.update(wrong.ranks)
        goes_on = ends and self._leave(wrong, cause)
        if goes_on:
            done = "its node takes no more work; others go on from the newest checkpoint"
        elif ends:
            done = "the run ended"
        self._events.note("corruption", cause, cause, done, step=step, seconds_lost=lost)
        if goes_on:
            raise PreemptedError(f"{cause}; {done}")
        if ends:
            raise SharedError(
                f"{cause}; keep this hardware out of the cluster and start the run again: it goes "
                "on after its newest checkpoint"
            )
        if self._mesh.rank == 0:
            _log.warning("%s; %s", cause, done)

    def _leave(self, wrong: Wrong, cause: str) -> bool:
        if not wrong.is_known or len(wrong.ranks) > 1:
            return False
        is_me, machines = self._mesh.rank in wrong.ranks, self.machines
        return any(from_all(is_me and machines.leave(machines.here(), cause)))


def bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's numbers, taken as integers, modulo 2^64: any order of adding
    gives the same, and one flipped bit always another.
    """
    here = local(tensor).detach().contiguous()
    return here.view(_INTEGERS[here.element_size()]).sum(dtype=torch.int64)
