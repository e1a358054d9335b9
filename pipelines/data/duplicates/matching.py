"""Documents in buckets, found the same or not, become connected components."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pipelines.data.duplicates.shingles import Indices

Features = npt.NDArray[np.uint8]
Same = Callable[[Features, Features], npt.NDArray[np.bool_]]


def link(features: Features, index: Indices, starts: Indices, same: Same) -> Indices:
    """Edges that join the members of each bucket into its connected components.

    All buckets are searched breadth-first at once: in each round a bucket's pivot, which is a
    member found but not yet asked, or else the first not found, is compared with all that are not
    found yet. Copies of one document take one round; only unlike members take more.

    Args:
        features: [documents, bytes], what `same` compares, row by row.
        index: [members], the document of each member, bucket by bucket.
        starts: [buckets], where each bucket starts in `index`.
        same: Whether two documents are the same, for rows of features.

    Returns:
        [edges, 2] members.
    """
    count = len(index)
    bucket = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, count)))
    member, new = np.arange(count), np.ones(count, bool)
    edges = [np.empty((0, 2), np.int64)]
    while len(member):
        starts = np.flatnonzero(np.diff(bucket, prepend=-1))
        sizes = np.diff(np.append(starts, len(member)))
        pivot = np.repeat(np.minimum.reduceat(member + count * new, starts) % count, sizes)
        rest = member != pivot
        asked = np.flatnonzero(rest & new)
        found = asked[same(features[index[member[asked]]], features[index[pivot[asked]]])]
        edges.append(np.stack([member[found], pivot[found]], axis=1))
        new[found] = False
        rest &= np.repeat(np.logical_or.reduceat(rest & new, starts), sizes)
        member, bucket, new = member[rest], bucket[rest], new[rest]
    return np.concatenate(edges)


def components(edges: Indices) -> Indices:
    """Each document of a component but the first, and that first: [documents, 2], ascending."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    documents, ends = np.unique(edges, return_inverse=True)
    left, right = ends.reshape(-1, 2).T
    graph = coo_array((np.ones(len(left), bool), (left, right)), shape=[len(documents)] * 2)
    _, label = connected_components(graph, directed=False)
    _, first = np.unique(label, return_index=True)
    pairs = np.stack([documents, documents[first[label]]], axis=1)
    return np.asarray(pairs[pairs[:, 0] != pairs[:, 1]])
