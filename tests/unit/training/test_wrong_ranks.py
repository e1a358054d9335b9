"""Who is wrong is known, and must be found in what all processes say."""

import pytest
import torch

from pipelines.training.corruption import bits
from pipelines.training.wrong_ranks import Statement, find_wrong, is_disputed

RIGHT, BAD = 1, 2


def said(*bits_by_rank: tuple[int, int], of: int = 0) -> list[Statement]:
    """Statements about the gradient of a rank's micro-batch."""
    return [Statement("gradient", of, rank, number) for rank, number in bits_by_rank]


def test_who_agree_have_nothing_to_dispute() -> None:
    assert not is_disputed([*said((0, 1), (1, 1)), *said((1, 2), (2, 2), of=1)])
    assert is_disputed([*said((0, 1), (1, 1)), *said((1, 2), (2, 3), of=1)])


@pytest.mark.parametrize(
    ("rounds", "ranks", "is_known"),
    [
        # A witness is wrong once; so is who is watched; nobody but they were asked.
        ([said((0, RIGHT), (1, BAD)), said((0, RIGHT), (1, RIGHT))], (1,), True),
        ([said((0, BAD), (1, RIGHT)), said((0, RIGHT), (1, RIGHT))], (0,), True),
        ([said((0, BAD), (0, RIGHT)), said((0, RIGHT), (0, RIGHT))], (0,), True),
        # One of two is wrong each time in the same way.
        ([said((0, RIGHT), (1, BAD)), said((0, RIGHT), (1, BAD))], (0, 1), False),
        # The second witness tells which.
        ([said((0, RIGHT), (1, BAD)), said((0, RIGHT), (2, RIGHT))], (1,), True),
        ([said((0, BAD), (1, RIGHT)), said((0, BAD), (2, RIGHT))], (0,), True),
        # Rank 1 is wrong about everything, and each time otherwise.
        (
            [
                [*said((0, RIGHT), (1, 7)), *said((1, 8), (2, RIGHT), of=1)],
                [*said((0, RIGHT), (2, RIGHT)), *said((1, 9), (0, RIGHT), of=1)],
            ],
            (1,),
            True,
        ),
        # Of many replicas, one has other weights.
        ([said(*((rank, BAD if rank == 3 else RIGHT) for rank in range(8)))], (3,), True),
        ([said((0, RIGHT), (1, BAD))], (0, 1), False),
        # Nobody says the same twice: all are wrong.
        ([said((0, 1), (1, 2)), said((0, 3), (1, 4))], (0, 1), True),
    ],
)
def test_the_wrong_ones_are_found(
    rounds: list[list[Statement]], ranks: tuple[int, ...], *, is_known: bool
) -> None:
    wrong = find_wrong(rounds)
    assert (wrong.ranks, wrong.is_known, wrong.what) == (ranks, is_known, ("gradient",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_each_single_bit_changes_the_sum(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(256, (6 * size,), dtype=torch.uint8, generator=draw)
    whole = bits(raw.view(dtype).view(2, 3))
    assert torch.equal(bits(raw.view(dtype).view(3, 2).t()), whole)
    for place in range(8 * len(raw)):
        flipped = raw.clone()
        flipped[place // 8] ^= 1 << place % 8
        assert not torch.equal(bits(flipped.view(dtype)), whole)
