"""Steps that would hurt the model are left out; after several in a row the run goes back.

A step is bad where its loss or gradient norm is no finite number, or stands far above those of the
steps before it, by median and median absolute deviation (Leys et al. 2013), which single outliers
do not move. Leaving such steps out is OLMo 2's way (2025, section 3), going back to a checkpoint
and on with other data PaLM's (Chowdhery et al. 2022, section 5.1).

All of it is decided on the device: the host asks only where it waits for the device anyway.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

WINDOW = 128  # steps that are remembered; before there are as many, none is too high
_NORMAL = 1.4826  # median absolute deviations of a normal distribution in its standard deviation
_LEAST_SPREAD = 0.05  # of the median: so that a very even stretch makes no ripple a spike


@dataclass(frozen=True)
class GuardState:
    """What a checkpoint keeps of a guard.

    Attributes:
        recent: Loss and gradient norm of the last steps, oldest first.
        good: Those of the last step that was not left out; empty before the first.
        in_row: Steps left out just now, one after the other.
        left_out: Steps left out so far.
        skipped: Half-open ranges of the data's steps, ascending, that are passed over.
    """

    recent: list[list[float]] = field(default_factory=list)
    good: list[float] = field(default_factory=list)
    in_row: int = 0
    left_out: int = 0
    skipped: list[list[int]] = field(default_factory=list)

    def data_step(self, step: int) -> int:
        """Which step of the data an optimizer step, from 0, is made with."""
        for start, stop in self.skipped:
            if step >= start:
                step += stop - start
        return step

    def passing_over(self, start: int, stop: int) -> "GuardState":
        """The same after going back: a range of data more, and none of its steps left out yet."""
        before = [each for each in self.skipped if each[0] < start]
        return replace(self, in_row=0, skipped=[*before, [start, stop]])


@dataclass(frozen=True)
class Verdict:
    """What the host learns at a log point.

    Attributes:
        loss: Of the last step that was not left out; of the last one where all were.
        norm: Likewise.
        any_good: Whether any step was not left out.
        worst_run: Most bad steps in a row since the run began or went on.
        left_out: Bad steps so far.
    """

    loss: float
    norm: float
    any_good: bool
    worst_run: int
    left_out: int


class Guard:
    """Judges each step of a run; every process comes to the same verdict."""

    def __init__(
        self, spike_sigma: float | None, device: torch.device, *, overflows: bool = False
    ) -> None:
        """Begin without a past.

        Args:
            spike_sigma: How many standard deviations above the median are too many; None: any
                finite number will do.
            device: Of losses and norms.
            overflows: Gradients of a sound step may overflow, as a loss scale is sought: such a
                step is left out, but is not a bad one.
        """
        self._sigma = spike_sigma
        self._overflows = overflows
        self._device = device
        self.restore(GuardState())

    def restore(self, state: GuardState) -> None:
        """Go on from a checkpoint."""
        nothing = [torch.nan, torch.nan]
        recent = [nothing] * (WINDOW - len(state.recent)) + state.recent
        self._recent = torch.tensor(recent, device=self._device)
        self._good = torch.tensor(state.good or nothing, device=self._device)
        self._point = self._good
        # Bad steps: in a row now, in a row at most, in all.
        counts = [state.in_row, state.in_row, state.left_out]
        self._counts = torch.tensor(counts, device=self._device)
        self._skipped = state.skipped

    def state(self) -> GuardState:
        """For a checkpoint; waits for the device."""
        recent = self._recent[~self._recent[:, 0].isnan()].tolist()
        good = self._good[~self._good.isnan()].tolist()
        in_row, _, left_out = self._counts.tolist()
        return GuardState(recent, good, in_row, left_out, self._skipped)

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether to leave a step out: 1.0 or 0.0, a scalar on the device.

        Args:
            loss: Nats a token over all processes, a scalar.
            norm: Of the whole gradient, a scalar.
        """
        self._point = torch.stack((loss, norm)).float()
        finite = self._point.isfinite().all()
        bad = ~finite | self._is_spike(self._point)
        # A spike is remembered too: a level that lasts becomes the usual one.
        moved = torch.cat((self._recent[1:], self._point.unsqueeze(0)))
        self._recent = torch.where(finite, moved, self._recent)
        self._good = torch.where(bad, self._good, self._point)
        leave_out = bad.float()
        if self._overflows:
            bad = bad & ~(loss.isfinite() & ~norm.isfinite())
        in_row, most, left_out = self._counts.unbind()
        in_row = torch.where(bad, in_row + 1, 0)
        self._counts = torch.stack((in_row, torch.maximum(most, in_row), left_out + bad))
        return leave_out

    def _is_spike(self, point: Tensor) -> Tensor:
        if self._sigma is None:
            return torch.zeros((), dtype=torch.bool, device=self._device)
        middle = _median(self._recent)
        spread = _NORMAL * _median((self._recent - middle).abs())
        bound = middle + self._sigma * torch.maximum(spread, _LEAST_SPREAD * middle)
        return (point > bound).any() & ~self._recent[0, 0].isnan()

    def verdict(self) -> Verdict:
        """Waits for the device."""
        figures = torch.cat((self._good, self._point, self._counts.float())).tolist()
        *points, _, worst_run, left_out = figures
        any_good = not math.isnan(points[0])
        loss, norm = points[:2] if any_good else points[2:]
        return Verdict(loss, norm, any_good, int(worst_run), int(left_out))


def _median(rows: Tensor) -> Tensor:
    """Of each column; `torch.median` is not deterministic on a GPU."""
    return rows.sort(dim=0).values[len(rows) // 2]


def step_unless(bad: Tensor, optimizer: Optimizer) -> None:
    """Let the optimizer step where `bad`, a scalar on its device, is 0.0.

    A fused optimizer looks at it on the device, as it does for a gradient scaler.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = bad  # type: ignore[attr-defined]
        optimizer.step()
    elif not bad.item():  # here the host waits: such an optimizer can't be told on the device
        optimizer.step()
