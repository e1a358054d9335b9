import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.core.errors import UserError
from pipelines.parallel.layout import (
    check_micro_batches,
    split_layers,
    stage_count,
    stage_numbers,
)


@given(st.integers(1, 40), st.integers(1, 8), st.floats(0, 12))
def test_layers_are_split_whole_and_in_order(layers: int, stages: int, after: float) -> None:
    if stages > layers:
        return
    ranges = split_layers(layers, stages, after=after)
    assert [layer for each in ranges for layer in each] == list(range(layers))
    assert all(len(each) > 0 for each in ranges)
    # Moving a layer from the slowest stage to another one would not make that one faster.
    loads = [len(each) for each in ranges[:-1]] + [len(ranges[-1]) + after]
    slowest = max(range(stages), key=loads.__getitem__)
    if len(ranges[slowest]) > 1:
        assert min(loads) + 1 >= loads[slowest]


def test_the_head_counts_as_the_layers_it_takes_as_long_as() -> None:
    assert [len(each) for each in split_layers(12, 2)] == [6, 6]
    assert [len(each) for each in split_layers(12, 2, after=4)] == [8, 4]
    assert [len(each) for each in split_layers(6, 4)] == [1, 1, 2, 2]


def test_every_process_has_its_stages() -> None:
    assert list(stage_numbers("1f1b", 4, 3)) == [3]
    assert list(stage_numbers("zero_bubble", 4, 1)) == [1, 5]
    assert stage_count("interleaved_1f1b", 4) == 8


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match="8 stages, but the model only 6 layers"):
        split_layers(6, 8)


def test_a_schedule_says_how_many_micro_batches_it_runs() -> None:
    for schedule, pp, number in [("gpipe", 4, 1), ("1f1b", 4, 4), ("zero_bubble", 4, 10)]:
        check_micro_batches(schedule, pp, number)
    with pytest.raises(UserError, match=r"1f1b\) over parallel\.pp\(4\) can't run 3 .* 4 at least"):
        check_micro_batches("1f1b", 4, 3)
    with pytest.raises(UserError, match="9 micro-batches a step, but a multiple of 2, such as 8"):
        check_micro_batches("interleaved_1f1b", 4, 9)
