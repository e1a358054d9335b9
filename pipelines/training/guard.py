"""Steps that would hurt the model are left out; after several in a row the run goes back.

A step is bad where its loss or gradient norm is no finite number, or stands far above those of the
steps before it: by median and median absolute deviation (Leys et al. 2013), which single outliers
do not move, of logarithms, as norms are spread to the large side. Leaving such steps out is OLMo
2's way (2025, section 3), going back to a checkpoint and on with other data PaLM's (Chowdhery et
al. 2022, section 5.1).

All of it is decided on the device: the host asks only where it waits for the device anyway.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

WINDOW = 128  # steps that are remembered; before there are as many, none is too high
_NORMAL = 1.4826  # median absolute deviations of a normal distribution in its standard deviation
_NOTHING = [math.nan, math.nan]
# Of loss and norm, as parts of themselves: a very even stretch makes no ripple a spike.
_LEAST_SPREAD = (0.05, 0.15)
_TINY = 1e-30  # for what is 0
_OVERFLOWS = 24  # in a row that a loss scale may be sought for; from 2^16 it falls to 2^-8


@dataclass(frozen=True)
class Verdict:
    """What the host learns at a log point.

    Attributes:
        loss: Of the last step that was not left out.
        norm: Likewise.
        last_loss: Of the last step.
        last_norm: Likewise.
        worst_run: Most bad steps in a row since the run began or went on.
        left_out: Bad steps so far.
    """

    loss: float
    norm: float
    last_loss: float
    last_norm: float
    worst_run: int
    left_out: int

    @property
    def any_good(self) -> bool:
        """Whether any step was not left out; if none was, `loss` is no number."""
        return not math.isnan(self.loss)


class Guard:
    """Judges each step of a run; every process comes to the same verdict.

    Attributes:
        skipped: Half-open ranges of the data's steps, ascending, that are passed over: one for
            each time that the run went back.
    """

    def __init__(
        self, spike_sigma: float | None, device: torch.device, *, overflows: bool = False
    ) -> None:
        """Begin without a past.

        Args:
            spike_sigma: How many standard deviations above the median are too many; None: any
                finite number will do.
            device: Of losses and norms.
            overflows: Gradients of a sound step may overflow, as a loss scale is sought: such a
                step is left out, but is not a bad one, unless no scale helps.
        """
        self._sigma = spike_sigma
        self._overflows = overflows
        self._device = device
        # A run in fp64 is one on a CPU; not every accelerator has it.
        self._dtype = torch.float64 if device.type == "cpu" else torch.float32
        self.skipped: list[list[int]] = []
        self._recent = self._tensor([_NOTHING] * WINDOW)  # loss and norm, the oldest first
        self._good = self._tensor(_NOTHING)  # of the last step that was not left out
        self._point = self._good  # of the last step
        self._least_spread = self._tensor(_LEAST_SPREAD)
        # Bad steps: in a row now, at most, in all; then overflows in a row now.
        self._counts = self._tensor([0, 0, 0, 0])

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; waits for the device."""
        known = ~self._recent[:, 0].isnan()
        return {
            "recent": self._recent[known].tolist(),
            "good": self._good[~self._good.isnan()].tolist(),
            "counts": self._counts.tolist(),
            "skipped": self.skipped,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        recent = state_dict["recent"]
        self._recent = self._tensor([_NOTHING] * (WINDOW - len(recent)) + recent)
        self._good = self._tensor(state_dict["good"] or _NOTHING)
        self._point = self._good
        self._counts = self._tensor(state_dict["counts"])
        self.skipped = state_dict["skipped"]

    def data_step(self, step: int) -> int:
        """Which step of the data an optimizer step, from 0, is made with."""
        for start, stop in self.skipped:
            if step >= start:
                step += stop - start
        return step

    def go_back(self, step: int, skipped: list[list[int]], stop: int) -> None:
        """After a checkpoint is loaded: none of its steps is bad, and other data come next.

        Args:
            step: The checkpoint's.
            skipped: What the run had skipped before it went back.
            stop: The first of the data's steps that was not tried yet.
        """
        self.skipped = skipped
        start = self.data_step(step)
        # An older checkpoint than last time: the new range holds the old one.
        self.skipped = [each for each in skipped if each[0] < start] + [[start, stop]]
        self._counts[:2] = 0

    @torch.no_grad()
    def leave_out(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether to leave a step out: 1.0 or 0.0, a scalar on the device.

        Args:
            loss: Nats a token over all processes, a scalar.
            norm: Of the whole gradient, a scalar.
        """
        self._point = torch.stack((loss, norm)).to(self._dtype)
        finite = self._point.isfinite().all()
        bad = ~finite | self._is_spike(self._point)
        # A spike is remembered too: a level that lasts becomes the usual one.
        moved = torch.cat((self._recent[1:], self._point.unsqueeze(0)))
        self._recent = torch.where(finite, moved, self._recent)
        self._good = torch.where(bad, self._good, self._point)
        leave_out = bad.float()
        in_row, most, left_out, overflows = self._counts.unbind()
        if self._overflows:
            overflow = loss.isfinite() & ~norm.isfinite()
            overflows = torch.where(overflow, overflows + 1, 0)
            bad = bad & ~(overflow & (overflows <= _OVERFLOWS))
        in_row = torch.where(bad, in_row + 1, 0)
        most = torch.maximum(most, in_row)
        self._counts = torch.stack((in_row, most, left_out + bad, overflows))
        return leave_out

    def _is_spike(self, point: Tensor) -> Tensor:
        if self._sigma is None:
            return torch.zeros((), dtype=torch.bool, device=self._device)
        logs = self._recent.clamp(min=_TINY).log()
        middle = _median(logs)
        spread = torch.maximum(_NORMAL * _median((logs - middle).abs()), self._least_spread)
        bound = middle + self._sigma * spread
        return (point.log() > bound).any() & ~self._recent[0, 0].isnan()

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=self._dtype, device=self._device)

    def verdict(self) -> Verdict:
        """Waits for the device."""
        figures = torch.cat((self._good, self._point, self._counts)).tolist()
        loss, norm, last_loss, last_norm, _, worst_run, left_out, _ = figures
        return Verdict(loss, norm, last_loss, last_norm, int(worst_run), int(left_out))


def _median(rows: Tensor) -> Tensor:
    """Return each column's median; `torch.median` is not deterministic on a GPU."""
    return rows.sort(dim=0).values[len(rows) // 2]


def step_unless(bad: Tensor, optimizer: Optimizer) -> None:
    """Let the optimizer step where `bad`, a scalar on its device, is 0.0.

    A fused optimizer looks at it on the device, as it does for a gradient scaler.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # Under offload to the CPU the host waits here: AdamW would not, and read it too early.
        device = optimizer.param_groups[0]["params"][0].device
        optimizer.found_inf = bad.to(device)  # type: ignore[attr-defined]
        optimizer.step()
    elif not bad.item():  # here the host waits: such an optimizer can't be told on the device
        optimizer.step()
