"""Which processes are slower than others that do the same work; from numbers alone.

The measure is how many times as long as the median process each one takes, several times, as one
late step must not name anybody. How much is usual is learnt from the numbers: their median absolute
deviation (Leys et al. 2013) over the processes and over time. Of processes that share hardware the
fastest counts: the others may only be in its way.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

KEPT = 4  # samples of each phase
_NEEDED = 3  # of these, in which a process must be slow
_LEAST = 0.25  # a process must take longer by this share: half of what is to be found
_SIGMAS = 3.0  # and by so many standard deviations
_NORMAL = 1.4826  # standard deviation ÷ median absolute deviation, for a normal distribution

Numbers = npt.NDArray[np.float64]


class Sample(NamedTuple):
    """The work of all processes in one phase, at about the same time."""

    step: int  # the first one that it is of, or that of a save
    seconds: Numbers  # by rank; NaN where it is not known
    least: float  # seconds that a process must lose to be worth naming


class Slow(NamedTuple):
    """A slow process."""

    rank: int
    ratio: float  # it takes so many times as long as the median one
    since: int  # the first step that is known to be slow
    alike: int  # processes that do the same, itself included
    late: float  # seconds more than usual, each time


class SlowRanks:
    """Names the processes that are slow in one phase of training.

    Attributes:
        slow: Who was slow at the last look.
    """

    def __init__(
        self, work: Sequence[float], alike: Sequence[Hashable], hardware: Sequence[Hashable]
    ) -> None:
        """Begin with no samples.

        Args:
            work: How much each rank has to do in this phase, in any unit.
            alike: Ranks with equal values here do the same, and are compared.
            hardware: What each rank runs on, such as its GPU.
        """
        self._work = np.asarray(work, float)
        self._together: dict[tuple[Hashable, Hashable], list[int]] = {}
        for rank, both in enumerate(zip(alike, hardware, strict=True)):
            self._together.setdefault(both, []).append(rank)
        groups: dict[Hashable, list[int]] = {}
        for (key, _), ranks in self._together.items():
            groups.setdefault(key, []).append(ranks[0])
        self._groups = [group for group in groups.values() if len(group) > 1]
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._named: set[int] = set()
        self.slow: list[Slow] = []

    def add(self, sample: Sample) -> None:
        """Take a sample; only the last ones are kept."""
        pace = sample.seconds / self._work
        seconds = sample.seconds.copy()
        for first, *others in self._together.values():
            seconds[first] = self._work[first] * np.fmin.reduce(pace[[first, *others]])
        self._samples.append(sample._replace(seconds=seconds))

    def news(self) -> tuple[list[Slow], list[int]]:
        """Return who is found to be slow, and the ranks that are slow no longer; each once."""
        slow: list[Slow] = []
        recovered: list[int] = []
        for group in self._groups:
            known = [each for each in self._samples if np.isfinite(each.seconds[group]).sum() > 1]
            if len(known) < _NEEDED:
                continue
            is_slow, ratios, late = self._judge(group, known)
            times = is_slow.sum(axis=0)
            for place in np.flatnonzero(times >= _NEEDED).tolist():
                when = is_slow[:, place]
                ratio, lateness = (float(np.median(each[when, place])) for each in (ratios, late))
                since = known[int(when.argmax())].step
                slow.append(Slow(group[place], ratio, since, len(group), lateness))
            recovered += [group[place] for place in np.flatnonzero(times == 0).tolist()]
        self.slow = slow
        begun = [each for each in slow if each.rank not in self._named]
        ended = sorted(self._named.intersection(recovered))
        self._named = (self._named | {each.rank for each in begun}).difference(ended)
        return begun, ended

    def _judge(
        self, group: list[int], known: list[Sample]
    ) -> tuple[npt.NDArray[np.bool_], Numbers, Numbers]:
        """Return for each sample which ranks are slow, their ratio to the median one, and how late
        they are.
        """
        seconds = np.stack([each.seconds[group] for each in known])
        ratios, usual = _to_median(seconds / self._work[group])
        late = seconds - usual * self._work[group]
        bound = 1 + np.maximum(_LEAST, _SIGMAS * _spread(ratios))
        # Who has more to do may take longer; who has less holds nobody up until it does, too.
        is_slow = (ratios >= bound) & (_to_median(seconds)[0] >= bound)
        return is_slow & (late >= np.array([[each.least] for each in known])), ratios, late


def _to_median(values: Numbers) -> tuple[Numbers, Numbers]:
    """Return values ÷ the median of their row, and the medians."""
    usual = _median(values)
    return values / np.maximum(usual, np.finfo(float).tiny), usual


def _spread(ratios: Numbers) -> Numbers:
    """Return the standard deviation without outliers: within each row, or over time if larger."""
    within = _median(abs(ratios - 1))
    over_time = _median(abs(ratios.T - _median(ratios.T)).reshape(1, -1))
    return _NORMAL * np.maximum(within, over_time)


def _median(values: Numbers) -> Numbers:
    """Return the median of each row as a column; of two values the lower, and without NaN."""
    known = np.isfinite(values).sum(axis=1, keepdims=True)
    return np.take_along_axis(np.sort(values, axis=1), (known - 1) // 2, axis=1)  # NaN comes last
