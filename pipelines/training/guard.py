"""Leaves out steps that would hurt the model; after several in a row the run goes back.

A step is bad if its loss or gradient norm is not finite, or is far above those of earlier steps.
The measure is the median and the median absolute deviation (Leys et al. 2013), which single
outliers do not move, of logarithms, because norms are skewed to the large side. OLMo 2 (2025,
section 3) leaves such steps out; PaLM (Chowdhery et al. 2022, section 5.1) goes back to a
checkpoint and on with other data.

All of this is decided on the device; the host asks only where it waits for the device anyway.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

WINDOW = 128  # steps that are remembered; until there are so many, none counts as a spike
_NORMAL = 1.4826  # standard deviation ÷ median absolute deviation, for a normal distribution
_NOTHING = [math.nan, math.nan]
# Relative, for loss and norm: after very even steps a small change must not be a spike.
_LEAST_SPREAD = (0.05, 0.15)
_TINY = 1e-30  # replaces 0 before the logarithm
_OVERFLOWS = 24  # allowed in a row while a loss scale is sought, which falls from 2^16 to 2^-8


@dataclass(frozen=True)
class Verdict:
    """The guard's results that the host reads at a log point.

    Attributes:
        loss: The loss of the last step that was not left out.
        norm: The gradient norm of that step.
        last_loss: The loss of the last step.
        last_norm: The gradient norm of the last step.
        worst_run: The most bad steps in a row since the run began or went on.
        left_out: The number of bad steps so far.
    """

    loss: float
    norm: float
    last_loss: float
    last_norm: float
    worst_run: int
    left_out: int

    @property
    def any_good(self) -> bool:
        """Whether any step was not left out; otherwise `loss` is NaN."""
        return not math.isnan(self.loss)


class Guard:
    """Judges each step of a run; every process comes to the same verdict.

    Attributes:
        skipped: Ascending, half-open ranges of the data's steps that are skipped, one for each
            time that the run went back.
    """

    def __init__(
        self, spike_sigma: float | None, device: torch.device, *, overflows: bool = False
    ) -> None:
        """Begin with no remembered steps.

        Args:
            spike_sigma: How many standard deviations above the median make a spike; None: any
                finite number is accepted.
            device: The device of losses and norms.
            overflows: Whether a good step's gradients may overflow while a loss scale is sought.
                Such a step is left out, but does not count as bad unless no scale helps.
        """
        self._sigma = spike_sigma
        self._overflows = overflows
        self._device = device
        # fp64 only on a CPU: not every accelerator supports it.
        self._dtype = torch.float64 if device.type == "cpu" else torch.float32
        self.skipped: list[list[int]] = []
        self._recent = self._tensor([_NOTHING] * WINDOW)  # loss and norm, the oldest first
        self._good = self._tensor(_NOTHING)  # loss and norm of the last step that was not left out
        self._point = self._good  # loss and norm of the last step
        self._least_spread = self._tensor(_LEAST_SPREAD)
        # Bad steps: in a row now, most in a row, total; then overflows in a row now.
        self._counts = self._tensor([0, 0, 0, 0])

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; this waits for the device."""
        known = ~self._recent[:, 0].isnan()
        return {
            "recent": self._recent[known].tolist(),
            "good": self._good[~self._good.isnan()].tolist(),
            "counts": self._counts.tolist(),
            "skipped": self.skipped,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        recent = state_dict["recent"]
        self._recent = self._tensor([_NOTHING] * (WINDOW - len(recent)) + recent)
        self._good = self._tensor(state_dict["good"] or _NOTHING)
        self._point = self._good
        self._counts = self._tensor(state_dict["counts"])
        self.skipped = state_dict["skipped"]

    def data_step(self, step: int) -> int:
        """Return the step of the data that an optimizer step, counted from 0, uses."""
        for start, stop in self.skipped:
            if step >= start:
                step += stop - start
        return step

    def go_back(self, step: int, skipped: list[list[int]], stop: int) -> None:
        """Reset the bad steps and skip the tried data, after a checkpoint is loaded.

        Args:
            step: The checkpoint's step.
            skipped: The ranges that the run had skipped before it went back.
            stop: The first step of the data that was not tried yet.
        """
        self.skipped = skipped
        start = self.data_step(step)
        # If the checkpoint is older than last time, the new range contains the old one.
        self.skipped = [each for each in skipped if each[0] < start] + [[start, stop]]
        self._counts[:2] = 0

    @torch.no_grad()
    def leave_out(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return 1.0 if the step is to be left out, or else 0.0, as a scalar on the device.

        Args:
            loss: Nats a token over all processes, a scalar.
            norm: The norm of the whole gradient, a scalar.
        """
        self._point = torch.stack((loss, norm)).to(self._dtype)
        finite = self._point.isfinite().all()
        bad = ~finite | self._is_spike(self._point)
        # Spikes are remembered too, so that a lasting higher level becomes the usual one.
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
        """Return the results so far; this waits for the device."""
        figures = torch.cat((self._good, self._point, self._counts)).tolist()
        loss, norm, last_loss, last_norm, _, worst_run, left_out, _ = figures
        return Verdict(loss, norm, last_loss, last_norm, int(worst_run), int(left_out))


def _median(rows: Tensor) -> Tensor:
    """Return each column's median; `torch.median` is not deterministic on a GPU."""
    return rows.sort(dim=0).values[len(rows) // 2]


def step_unless(bad: Tensor, optimizer: Optimizer) -> None:
    """Let the optimizer step if `bad`, a scalar on the weights' device, is 0.0.

    A fused optimizer, and Muon, read `bad` on the device, as they do for a gradient scaler.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = bad  # type: ignore[attr-defined]
        optimizer.step()
    elif not bad.item():  # the host waits here, as this optimizer can't read `bad` on the device
        optimizer.step()
