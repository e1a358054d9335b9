import itertools
import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.loading.sampler import Indices, Mixture, mixed_samples, permute, samples, share

seeds = st.integers(0, 2**31)
quick = settings(max_examples=40)


@st.composite
def mixtures(draw: st.DrawFn, largest_total: int) -> Mixture:
    size = draw(st.integers(2, 5))
    of = st.lists(st.integers(1, 30), min_size=size, max_size=size)
    totals = st.lists(st.integers(1, largest_total), min_size=size, max_size=size)
    return Mixture(tuple(draw(of)), tuple(draw(totals)))


def stream(seed: int, mixture: Mixture, length: int) -> Indices:
    """The first samples of a mixture's order."""
    return mixed_samples(seed, 0, 0, 1, length, mixture)


def parts(drawn: Indices, mixture: Mixture) -> list[Indices]:
    """What of a mixture's samples each dataset gave, in order, under its own numbers."""
    ends = np.cumsum(mixture.totals)
    return [
        drawn[(drawn >= end - total) & (drawn < end)] - (end - total)
        for end, total in zip(ends, mixture.totals, strict=True)
    ]


@quick
@given(seed=seeds, total=st.integers(1, 3000), epoch=st.integers(0, 5))
def test_the_permutation_reads_each_sample_once(seed: int, total: int, epoch: int) -> None:
    order = permute(np.arange(total), total, (seed, epoch))
    assert sorted(order.tolist()) == list(range(total))


@quick
@given(seed=seeds, total=st.integers(1, 100), batch=st.integers(1, 64), epoch=st.integers(0, 2))
def test_steps_go_through_epochs_one_after_another(
    seed: int, total: int, batch: int, epoch: int
) -> None:
    """Also where the batch does not divide the number of samples, or is greater."""
    steps = -(-total * (epoch + 1) // batch)
    stream = np.concatenate([samples(seed, step, 0, 1, batch, total) for step in range(steps)])
    one_epoch = stream[epoch * total : (epoch + 1) * total]
    assert sorted(one_epoch.tolist()) == list(range(total))


@quick
@given(
    seed=seeds,
    step=st.integers(0, 10**6),
    world=st.integers(1, 9),
    batch=st.integers(9, 100),
    total=st.integers(100, 10**12),
)
def test_the_order_is_the_same_for_any_number_of_processes(
    seed: int, step: int, world: int, batch: int, total: int
) -> None:
    parts = [samples(seed, step, rank, world, batch, total) for rank in range(world)]
    whole = samples(seed, step, 0, 1, batch, total)
    assert np.concatenate(parts).tolist() == whole.tolist()
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@quick
@given(
    seed=seeds,
    total=st.integers(1, 10**12),
    batch=st.integers(1, 300),
    start=st.integers(0, 10**10),
    worlds=st.lists(st.integers(1, 12), min_size=1, max_size=6),
)
def test_a_run_that_resumes_sees_what_it_would_have_seen(
    seed: int, total: int, batch: int, start: int, worlds: list[int]
) -> None:
    """At any step, each time on another number of processes, against one that was never cut."""
    resumed = [
        samples(seed, start + done, rank, world, batch, total)
        for done, world in enumerate(worlds)
        for rank in range(world)
    ]
    first, last = start * batch, (start + len(worlds)) * batch
    expected = [
        int(permute(np.array([position % total]), total, (seed, position // total))[0])
        for position in {first, (first + last) // 2, last - 1}
    ]
    stream = np.concatenate(resumed)
    assert len(stream) == last - first
    places = [position - first for position in {first, (first + last) // 2, last - 1}]
    assert stream[places].tolist() == expected


@quick
@given(
    seed=seeds,
    total=st.integers(10**6, 10**12),
    step=st.integers(0, 10**6),
    world=st.integers(1, 64),
)
def test_ranks_share_no_sample_within_an_epoch(
    seed: int, total: int, step: int, world: int
) -> None:
    batch = 2000
    step %= total // batch - 3  # so that the steps are of one epoch
    seen = [
        sample
        for each in range(step, step + 3)
        for rank in range(world)
        for sample in samples(seed, each, rank, world, batch, total).tolist()
    ]
    assert len(set(seen)) == 3 * batch
    assert min(seen) >= 0
    assert max(seen) < total


def test_memory_does_not_grow_with_the_data() -> None:
    """A resumed run's first step: the peak is the same at 10^12 samples as at 10^6."""
    peaks = []
    for total in (10**6, 10**12):
        tracemalloc.start()
        samples(11, 10**9, 3, 8, 512, total)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0] < 1_000_000


@quick
@given(world=st.integers(1, 50), batch=st.integers(1, 500))
def test_shares_lie_one_behind_the_other(world: int, batch: int) -> None:
    bounds = [share(rank, world, batch) for rank in range(world)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == batch
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(permute(np.arange(50), 50, (seed, epoch)).tolist())
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders) == 100


def test_the_order_is_written_in_stone() -> None:
    """A resumed run must see what it would have seen, also after an upgrade."""
    assert samples(42, 3, 0, 1, 8, 1000).tolist() == [288, 851, 774, 67, 339, 661, 195, 379]


def test_the_order_looks_random() -> None:
    """No trace of the input order: rank correlation near nought, every place equally likely."""
    order = permute(np.arange(10_000), 10_000, (7, 0))
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.03
    first = [int(permute(np.arange(1), 7, (seed, 0))[0]) for seed in range(7000)]
    assert (abs(np.bincount(first, minlength=7) - 1000) < 150).all()


@quick
@given(seed=seeds, mixture=mixtures(10**12), cycle=st.integers(0, 10**9), cycles=st.integers(1, 3))
def test_each_cycle_of_a_mixture_has_exactly_the_proportions(
    seed: int, mixture: Mixture, cycle: int, cycles: int
) -> None:
    length = sum(mixture.weights)
    for each in range(cycle, cycle + cycles):
        drawn = mixed_samples(seed, each, 0, 1, length, mixture)
        assert [len(part) for part in parts(drawn, mixture)] == list(mixture.weights)


@quick
@given(seed=seeds, mixture=mixtures(60), epochs=st.integers(1, 4))
def test_each_dataset_of_a_mixture_goes_through_epochs_of_its_own(
    seed: int, mixture: Mixture, epochs: int
) -> None:
    """Each of its samples once before any a second time, each epoch; small ones more often."""
    drawn = stream(seed, mixture, 5000)
    for part, total in zip(parts(drawn, mixture), mixture.totals, strict=True):
        for epoch in range(min(epochs, len(part) // total)):
            one = part[epoch * total : (epoch + 1) * total]
            assert sorted(one.tolist()) == list(range(total))
        rest = part[len(part) // total * total :]
        assert len(set(rest.tolist())) == len(rest)


@quick
@given(
    seed=seeds,
    step=st.integers(0, 10**7),
    worlds=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    batch=st.integers(9, 300),
    mixture=mixtures(10**12),
)
def test_a_mixture_resumes_at_any_step_on_any_number_of_processes(
    seed: int, step: int, worlds: list[int], batch: int, mixture: Mixture
) -> None:
    """Ranks are disjoint slices of the step's batch, and steps of one order without a gap."""
    resumed = [
        mixed_samples(seed, step + done, rank, world, batch, mixture)
        for done, world in enumerate(worlds)
        for rank in range(world)
    ]
    # The same positions as single samples a step, each worked out alone.
    first, count = step * batch, batch * len(worlds)
    alone = [mixed_samples(seed, first + each, 0, 1, 1, mixture)[0] for each in range(count)]
    assert np.concatenate(resumed).tolist() == [int(each) for each in alone]


@quick
@given(seed=seeds, mixture=mixtures(10**12), step=st.integers(0, 1000))
def test_ranks_of_a_mixture_share_no_sample(seed: int, mixture: Mixture, step: int) -> None:
    """While no dataset is at its end; a step may be of several blocks."""
    large = Mixture(mixture.weights, tuple(10**9 + total for total in mixture.totals))
    drawn = [mixed_samples(seed, step, rank, 7, 5000, large).tolist() for rank in range(7)]
    assert len(set(itertools.chain(*drawn))) == 5000


def test_memory_does_not_grow_with_a_mixture() -> None:
    peaks = []
    for total in (10**6, 10**12):
        tracemalloc.start()
        mixed_samples(11, 10**9, 3, 8, 512, Mixture((7, 3), (total, total)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0] < 3_000_000


def test_the_order_of_a_mixture_is_written_in_stone() -> None:
    mixture = Mixture((7, 3), (1000, 50))
    expected = [1015, 777, 153, 1030, 1049, 14, 969, 668, 862, 746]
    assert mixed_samples(42, 3, 0, 1, 10, mixture).tolist() == expected


def test_the_order_of_a_mixture_looks_random() -> None:
    """Every place of a cycle is as likely to be of the rarer dataset; cycles and epochs differ."""
    mixture = Mixture((7, 3), (1000, 50))
    drawn = stream(7, mixture, 100_000)
    places = np.flatnonzero(drawn >= 1000) % 10
    assert (abs(np.bincount(places, minlength=10) - 3000) < 250).all()
    common, rare = parts(drawn, mixture)
    assert abs(np.corrcoef(common[:1000], np.arange(1000))[0, 1]) < 0.1
    epochs = {tuple(epoch) for epoch in rare.reshape(-1, 50).tolist()}
    assert len(epochs) == 600
    other = stream(8, mixture, 100)
    assert other.tolist() != drawn[:100].tolist()
