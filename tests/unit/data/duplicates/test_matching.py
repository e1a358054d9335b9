import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.csgraph import connected_components

from pipelines.data.duplicates.deduplication import components, link

BUCKETS = st.lists(
    st.lists(st.integers(0, 15), min_size=1, max_size=9, unique=True), min_size=1, max_size=5
)


@given(BUCKETS, st.integers(0, 5))
def test_linking_finds_the_components_that_all_pairs_have(
    buckets: list[list[int]], near: int
) -> None:
    """Documents are points 0 to 45 on a line; those at most `near` apart are the same."""
    points = np.arange(16, dtype=np.uint8)[:, None] * 3
    index = np.concatenate([np.array(sorted(bucket)) for bucket in buckets])
    starts = np.cumsum([0, *map(len, buckets)])[:-1]
    edges = link(points, index, starts, lambda a, b: np.abs(a - b.astype(int))[:, 0] <= near)

    bucket = np.repeat(np.arange(len(buckets)), [len(found) for found in buckets])
    apart = np.abs(points[index].astype(int) - points[index].T.astype(int))
    together = (apart <= near) & (bucket[:, None] == bucket)
    count, labels = connected_components(together)
    assert len(edges) == len(index) - count  # a forest
    assert all(labels[left] == labels[right] for left, right in edges)


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ([], []),
        ([[7, 3]], [[7, 3]]),
        ([[9, 7], [7, 3], [5, 4], [9, 3]], [[5, 4], [7, 3], [9, 3]]),
        ([[2**40, 1], [2**40, 2]], [[2, 1], [2**40, 1]]),
    ],
)
def test_the_first_of_a_component_stays(edges: list[list[int]], expected: list[list[int]]) -> None:
    assert components(np.array(edges, np.int64).reshape(-1, 2)).tolist() == expected
