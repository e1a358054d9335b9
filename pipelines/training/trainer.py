"""The training loop, which runs under torchrun, under Ray Train or alone, and uses none of them."""

import logging
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from torch import Tensor

from pipelines.core.errors import SharedError
from pipelines.loading.dataloader import Batch, Loader
from pipelines.loading.sampler import micro_batches
from pipelines.parallel.gradients import beside, clip_factor, gradient_norm, scale_gradients
from pipelines.parallel.parallelize import Parallelized
from pipelines.parallel.process_group import StepConsensus, from_all
from pipelines.recipe.recipe import Recipe
from pipelines.training import preemption, profiling
from pipelines.training.checkpoint.checkpointer import (
    Checkpoints,
    Position,
    SaveRequest,
    Stateful,
)
from pipelines.training.checkpoint.patience import Patience
from pipelines.training.checkpoint.store import CheckpointStore
from pipelines.training.corruption import Corruption
from pipelines.training.forward_backward import StepBatches, forward_backward, seed_step
from pipelines.training.guard import Guard, Verdict, step_unless
from pipelines.training.hooks import Events, Hooks
from pipelines.training.machine_report import memory_in_use
from pipelines.training.meter import Meter, Window
from pipelines.training.metrics import Report, StepMetrics
from pipelines.training.optimizer import build_optimizer
from pipelines.training.policy_loss import PolicyLoss
from pipelines.training.precision import LossScale, set_deterministic, set_precision
from pipelines.training.preemption import Notice, PreemptedError
from pipelines.training.preference import PairLoss
from pipelines.training.profiling import StepProfiler
from pipelines.training.routing import Routing
from pipelines.training.schedule import Schedule, set_learning_rate
from pipelines.training.stragglers import Stragglers
from pipelines.training.watchdog import Watchdog
from pipelines.training.wrong_ranks import Wrong

_log = logging.getLogger(__name__)


class _Requests(NamedTuple):
    """What the processes want after a step."""

    notices: list[Notice]  # why the run has to end early
    saves: set[SaveRequest]


class Trainer:
    """Trains a model on the batches of a loader.

    A step depends only on the recipe, its number and the state before it, so on the same hardware
    a resumed run is bit-identical to an uninterrupted one.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Parallelized,
        loader: Loader,
        report: Report,
        checkpoints: Path | str,
        diagnostics: Path,
        events: Events | None = None,
        last_step: int | None = None,
    ) -> None:
        """Set up this process's part of the training.

        Args:
            recipe: `seed` and `train` are used.
            model: The model, which is trained in place.
            loader: Yields this process's share of each step.
            report: Called on every process every `train.log_every` steps, at each checkpoint and
                at the end.
            checkpoints: A folder or s3:// URL that all processes share.
            diagnostics: A shared folder for heartbeats, stacks of stalled processes and traces.
            events: Is told what happens to the run.
            last_step: The number of steps to end after, if the clock chose it in an earlier run.
        """
        self.recipe = recipe
        self.train = train = recipe.train
        self.schedule = Schedule(train, last_step)
        self.loader = loader
        self.report = report
        self.events = events or Events()
        self.model = model
        self.mesh = model.mesh
        self.device = model.mesh.device
        precision = train.fixed_precision
        set_precision(train, self.device)
        set_deterministic(train.deterministic)
        if train.attention == "varlen":
            for part in model.modules:
                part.most_documents = loader.most_documents
        self.parameters = model.parameters()
        self.optimizer = build_optimizer(model, train, paged=recipe.parallel.paged_moments)
        self.scale = LossScale(precision, self.device)
        # With rewards the loss has any sign, and no gradient is left once all answers are right.
        sigma = None if recipe.reinforcement.is_on else train.spike_sigma
        self.guard = Guard(sigma, self.device, overflows=precision == "fp16")
        self.routing = Routing(model, train, loader.tokens_per_step)
        self.objective = self._objective()
        self.checkpoints = self._checkpoints(CheckpointStore(checkpoints))
        self.consensus = StepConsensus(self.mesh)
        self._went_back_at = 0.0  # measured like `Position.seconds`
        number = micro_batches(
            train.global_batch_size, self.mesh.dp_world, train.fixed_micro_batch_size
        )
        counted = None if self.objective is None else self.objective.counted
        self.batches = StepBatches(loader, self.mesh, number, counted)
        self.forward_backward = forward_backward(recipe, model, number)
        self.meter = Meter(recipe, model, loader.tokens_per_step)
        who = self.mesh.rank, self.mesh.layout.world
        self.profiler = StepProfiler(train.profile_steps, diagnostics / "profile", *who)
        self.watchdog = Watchdog(diagnostics / "heartbeats", *who, train.stall_seconds, self.events)
        self.stragglers = Stragglers(recipe, model, self.checkpoints, self.events)
        self.corruption = Corruption(recipe, model, self.optimizer, self.events)

    def _objective(self) -> PairLoss | PolicyLoss | None:
        """Return the loss of preference tuning or reinforcement, and have the model compute it."""
        loss: PairLoss | PolicyLoss
        if self.recipe.preference.kind != "none":
            loss = PairLoss(self.recipe.preference, self.loader.most_documents, self.mesh)
        elif self.recipe.reinforcement.is_on:
            loss = PolicyLoss(self.recipe.reinforcement, self.mesh)
        else:
            return None
        for part in self.model.modules:
            part.objective = loss
        return loss

    def _checkpoints(self, store: CheckpointStore) -> Checkpoints:
        """Return the run's checkpoints, with all that a step depends on."""
        train = self.train
        others: dict[str, Stateful] = {"loss_scale": self.scale, "guard": self.guard}
        others |= {"schedule": self.schedule, **self.loader.states}
        if self.model.modules[0].config.experts:
            others["routing"] = self.routing
        if isinstance(self.objective, PairLoss) and self.recipe.preference.kind == "kto":
            others["pair_loss"] = self.objective
        return Checkpoints(
            store,
            self.model,
            self.optimizer,
            others=others,
            keep=train.keep_checkpoints,
            keep_best=train.keep_best,
            patience=Patience(train.checkpoint_every, self.events),
            copy_every=train.copy_every,
        )

    def fit(self) -> Position:
        """Train to the last step or the time limit, and return the position reached.

        Raises:
            SharedError: too many steps in a row were bad, and the run can't go back again; or no
                checkpoint could be written for too long.
            PreemptedError: a process was told that it will be stopped, and the run was saved.
        """
        with (
            profiling.only_between_steps(),
            self.checkpoints,
            self.hooks,
            preemption.listening(),
        ):
            return self._fit()

    @property
    def hooks(self) -> Hooks:
        """The run's hooks, in the order in which they are called."""
        named = self.stragglers, self.corruption
        return Hooks(self.events, self.watchdog, self.profiler, *named, self.meter)

    def _fit(self) -> Position:
        hooks = self.hooks
        position = since = self.checkpoints.resume()  # since: position of the last report
        hooks.begin_training(position.step)
        for part in self.model.parts:
            part.train()
        hooks.begin_window()
        if not self._finished(position):
            # The time may have been over before, when the run was stopped while it wrote its model.
            self._hear_requests(position)
        first = position.step
        while not self._finished(position):
            if self.corruption.is_due(position.step) and (wrong := self.corruption.differing()):
                now = self._now(position)
                position = since = self._undo(now, wrong)
                hooks.begin_window()
            self._step(position)
            if position.step == first:
                self.model.check_overlap(self.recipe)
            position = Position(position.step + 1, position.seconds)
            requests = None
            if self.consensus.is_wanted() and not self._finished(position):
                requests = self._hear_requests(position)
            finished = self._finished(position)
            hooks.after_step(position.step - 1, last=finished)
            saves = finished or position.step % self.train.checkpoint_every == 0
            if saves or position.step % self.train.log_every == 0:
                position, finished = self._report_and_save(position, since, saves, finished)
                since = position
                hooks.begin_window()
            if requests and not finished:
                self._answer(requests, position)
            if not finished:
                self.checkpoints.copy(self._now(position))
        self.checkpoints.finish(position)
        return position

    def _report_and_save(
        self, position: Position, since: Position, saves: bool, finished: bool
    ) -> tuple[Position, bool]:
        """Report, and save if that is due; or go back if the last steps were bad."""
        self.hooks.enter_phase(position.step, "report")
        samples = self._samples(position.step)  # while the device is still busy
        verdict = self.guard.verdict()  # the one place where the host waits for the device
        self.routing.end_window(position.step - since.step)
        if self.objective is not None:
            self.objective.end_window()
        profiling.collect()
        position = self._now(position)
        if verdict.worst_run >= self.train.max_bad_steps or self.routing.collapse:
            return self._go_back(position, verdict), False
        self._tell(position, since, verdict, samples, finished)
        if saves and verdict.any_good:  # weights that were never good are not saved
            self.hooks.enter_phase(position.step, "checkpoint")
            if wrong := self.corruption.differing():
                return self._undo(position, wrong), False
            self.checkpoints.save(position)
        return position, finished

    def _hear_requests(self, position: Position) -> "_Requests":
        """Return what the processes want; all call it after the same step."""
        mine = preemption.asked(), self.checkpoints.request, self._end_by_clock(position)
        notices, saves, ends = zip(*from_all(mine), strict=True)
        if ends[0] is not None:
            self.schedule.end_after(ends[0])
            _log.info("step %d: the run ends after step %d, by the clock", position.step, ends[0])
        return _Requests([notice for notice in notices if notice], set(filter(None, saves)))

    def _answer(self, requests: "_Requests", position: Position) -> None:
        """End the run early, or look at a failed save."""
        if requests.notices:
            self._end_early(position, requests.notices)
        if "retry" in requests.saves and self.corruption.differing():
            return  # the next check finds it, too, and the run goes back
        now = self._now(position)
        self.checkpoints.answer(requests.saves, now)

    def _end_early(self, position: Position, notices: list[Notice]) -> NoReturn:
        """Save the weights, unless the last steps are to be undone, and end the run."""
        began = time.perf_counter()
        self.hooks.enter_phase(position.step, "checkpoint")
        verdict = self.guard.verdict()
        is_good = verdict.any_good and verdict.worst_run < self.train.max_bad_steps
        is_good = is_good and not self.corruption.differing()
        now = self._now(position)
        saved = self.checkpoints.save_now(now, is_good=is_good)
        done = f"saved in {time.perf_counter() - began:.1f} s" if saved else "not saved"
        done += f"; the run goes on after step {self.checkpoints.newest}"
        reason = ", ".join(dict.fromkeys(notice.reason for notice in notices))
        _log.warning("step %d: %s: %s", position.step, reason, done)
        if any(notice.is_preemption for notice in notices):
            key = f"preemption at step {position.step}: {reason}"
            self.events.note("preemption", key, reason, done, step=position.step)
        raise PreemptedError(f"step {position.step}: {reason}: {done}")

    def _step(self, position: Position) -> None:
        """Run one optimizer step on this process's share of the batch."""
        hooks, step = self.hooks, position.step
        # Before a profile begins, which would count their end but not their beginning.
        for parameter in self.parameters:
            parameter.grad = None
        hooks.before_step(step)
        seed_step(self.recipe.seed, step, self.mesh.token_rank)
        set_learning_rate(self.optimizer, self.schedule.rate(step))
        hooks.enter_phase(step, "data")
        communicates = partial(hooks.enter_phase, step, "communication")
        batches, predicted = self.batches.of(self.guard.data_step(step), communicates)
        # Each token has the same weight on any process; the mean over processes is taken later.
        share = self.scale.scale * self.mesh.layout.dp_cp / predicted
        self.routing.weigh(self.scale.scale)

        def passes(micro_batches: Iterable[tuple[Batch, bool]]) -> Tensor:
            return self.forward_backward(_in_phases(micro_batches, step, hooks), share)

        nats = self.corruption.forward_backward(step, batches, passes)
        if self.objective is not None:
            self.objective.end_step(self.batches.number)
        communicates()
        norm = gradient_norm(self.model.counted(), self.mesh) / self.scale.scale
        factor = clip_factor(norm, self.train.grad_clip) / self.scale.scale
        wants = preemption.asked() is not None or self.checkpoints.request is not None
        wants = wants or self._end_by_clock(position) is not None
        self.checkpoints.before_sums(step)
        nats = self.consensus.sum(nats, "pp", "dp_replicate", "dp_shard", "cp", wanted=wants)
        hooks.enter_phase(step, "optimizer")
        bad = self.guard.leave_out(nats / predicted, norm)
        self.routing.move_biases(bad)
        factor, bad = beside(self.parameters[0], factor, bad)
        scale_gradients(self.parameters, factor)
        self.checkpoints.before_update()
        step_unless(bad, self.optimizer)
        self.scale.update(norm)

    def _samples(self, step: int) -> str:
        """Return a hash of the samples, in order, since the last multiple of `log_every` steps."""
        first = (step - 1) // self.train.log_every * self.train.log_every
        return self.loader.digest([self.guard.data_step(each) for each in range(first, step)])

    def _tell(
        self, position: Position, since: Position, verdict: Verdict, samples: str, last: bool
    ) -> None:
        """Report a point of the curves if any step was good."""
        if verdict.any_good:
            seen = self.profiler.communication_share, self._memory_in_use()
            window = self.meter.end(position.step - since.step, *seen)
            metrics = self._metrics(position, verdict, window, samples, last)
            self.checkpoints.note(metrics.loss)
            _log.info("%s", metrics.line())
            self.report(metrics)
        elif last:
            raise self._failure(position, verdict, "")

    def _memory_in_use(self) -> int | None:
        modules = self.model.modules
        return memory_in_use(self.device, modules, self.optimizer, self.profiler.step_bytes)

    def _metrics(
        self, position: Position, verdict: Verdict, window: Window, samples: str, last: bool
    ) -> StepMetrics:
        tokens, used = self.loader.tokens_per_step, window.utilisation
        bound_by, bound_share = used.bound_by()
        return StepMetrics(
            step=position.step,
            last_step=self.schedule.last_step,
            tokens=position.step * tokens,
            loss=verdict.loss,
            learning_rate=self.schedule.rate(position.step - 1),
            gradient_norm=verdict.norm,
            steps_left_out=verdict.left_out,
            samples=samples,
            step_seconds=window.seconds,
            tokens_per_second=tokens / window.seconds,
            mfu=used.mfu,
            mbu=used.mbu,
            data_wait_share=used.storage,
            communication_share=self.profiler.communication_share,
            memory_bytes=window.peak_bytes,
            bound_by=bound_by,
            bound_share=bound_share,
            further=self._further(),
            expert_shares=self.routing.shares,
            last=last,
        )

    def _further(self) -> dict[str, float]:
        of_loss = self.objective.figures if self.objective else {}
        return self.routing.figures | of_loss | self.loader.end_window()

    def _go_back(self, position: Position, verdict: Verdict) -> Position:
        """Load the last checkpoint, and skip the data that were seen since then."""
        skipped = self.guard.skipped
        tried = self.guard.data_step(position.step)
        collapse = self.routing.collapse  # which the checkpoint does not know
        if len(skipped) >= self.train.max_rollbacks:
            raise self._failure(position, verdict, collapse)
        back = self.checkpoints.restore()
        if back.step == 0:
            raise self._failure(position, verdict, collapse)
        self.guard.go_back(back.step, skipped, tried)
        cause = collapse or (
            f"{verdict.worst_run} bad steps in a row up to step {position.step} "
            f"(loss {verdict.last_loss:.4g}, gradient norm {verdict.last_norm:.4g})"
        )
        done = f"went back to step {back.step}, and goes on with other data"
        self.routing.go_back()
        _log.warning("%s: %s", cause, done)
        key = f"rollback {len(skipped) + 1} at step {position.step}"
        lost = self._lost(position, back)
        self.events.note("rollback", key, cause, done, step=position.step, seconds_lost=lost)
        return Position(back.step, position.seconds)

    def _undo(self, position: Position, wrong: Wrong) -> Position:
        """Load the last checkpoint, whose weights were compared, and take the same steps again."""
        back = self.checkpoints.restore()
        self.routing.go_back()
        done, lost = f"went back to step {back.step}", self._lost(position, back)
        ends = back.step == 0 or self.corruption.was_wrong(wrong)
        self.corruption.tell(position.step, wrong, done, ends=ends, lost=lost)
        return Position(back.step, position.seconds)

    def _lost(self, position: Position, back: Position) -> float:
        """Return the seconds of the steps that are undone."""
        lost = position.seconds - max(back.seconds, self._went_back_at)
        self._went_back_at = position.seconds
        return lost

    def _failure(self, position: Position, verdict: Verdict, collapse: str) -> SharedError:
        times = len(self.guard.skipped)
        after = f" after going back to a checkpoint {times} times" if times else ""
        if collapse:
            return SharedError(
                f"{collapse}, at step {position.step}{after}; raise "
                f"train.balance_loss({self.train.balance_loss:g}) or lower "
                f"train.lr({self.train.lr:g})"
            )
        return SharedError(
            f"the loss is {verdict.last_loss:.6g} at step {position.step}, the gradient norm "
            f"{verdict.last_norm:.6g}{after}; lower train.lr({self.train.lr}) or raise "
            f"train.warmup_steps({self.train.warmup_steps})"
        )

    def _now(self, position: Position) -> Position:
        """Return the position with the seconds since the last report."""
        return Position(position.step, position.seconds + self.meter.elapsed)

    def _finished(self, position: Position) -> bool:
        return position.step >= self.schedule.last_step

    def _end_by_clock(self, position: Position) -> int | None:
        """Return the last step if rank 0's clock chooses it now; None on other ranks."""
        seconds = position.seconds + self.meter.elapsed
        return self.schedule.end_by_clock(position.step, seconds) if self.mesh.rank == 0 else None


def _in_phases(
    batches: Iterable[tuple[Batch, bool]], step: int, hooks: Hooks
) -> Iterator[tuple[Batch, bool]]:
    """Yield the micro-batches, and tell the hooks when the process waits and when it computes."""
    for each in batches:
        hooks.enter_phase(step, "forward and backward")
        yield each
        hooks.enter_phase(step, "data")
    hooks.enter_phase(step, "forward and backward")  # a pipeline has drawn them all before
