import pytest
import torch

from pipelines.loading.dataloader import IGNORED, Batch
from pipelines.training.forward_backward import evenly


def batches(number: int) -> list[tuple[Batch, bool]]:
    made = [Batch(torch.full((2, 3), n), torch.full((2, 3), n)) for n in range(number)]
    return [(batch, n == number - 1) for n, batch in enumerate(made)]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_what_is_missing_predicts_nothing(missing: int) -> None:
    found = list(evenly(batches(2), 2 + missing))
    assert [is_last for _, is_last in found] == [False] * (1 + missing) + [True]
    for (batch, _), (expected, _) in zip(found[:2], batches(2), strict=True):
        assert torch.equal(batch.targets_BS, expected.targets_BS)
    for batch, _ in found[2:]:
        assert batch.inputs_BS.shape == (2, 3)
        assert (batch.targets_BS == IGNORED).all()
