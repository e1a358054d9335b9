"""Batches of tokens on this process's device."""

# ruff: noqa: N815 (names that end in their shape)

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipelines.core.errors import UserError
from pipelines.loading.sampler import samples
from pipelines.loading.token_dataset import TokenDataset


class Batch(NamedTuple):
    """One micro-batch; both int64 [B, S], the targets one token later."""

    inputs_BS: Tensor
    targets_BS: Tensor


class TokenLoader:
    """What this process trains on at a given step; it has no other state."""

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        dp_rank: int,
        dp_world: int,
        device: torch.device,
    ) -> None:
        if global_batch < dp_world:
            raise UserError(
                f"train.global_batch_size({global_batch}) is smaller than the number of "
                f"workers({dp_world}): each needs at least one sample"
            )
        self.tokens_per_step = global_batch * dataset.sequence_length
        self._dataset = dataset
        self._seed = seed
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._dp_rank = dp_rank
        self._dp_world = dp_world
        self._device = device

    def micro_batches(self, step: int) -> Iterator[tuple[Batch, bool]]:
        """The micro-batches of one step, each with whether it is the last one.

        The last may be smaller: workers need not divide the global batch.
        """
        indices = samples(
            self._seed,
            step,
            self._dp_rank,
            self._dp_world,
            self._global_batch,
            len(self._dataset),
        )
        for start in range(0, len(indices), self._micro_batch):
            stop = start + self._micro_batch
            yield self._read(indices[start:stop].tolist()), stop >= len(indices)

    def _read(self, indices: list[int]) -> Batch:
        rows = torch.from_numpy(np.stack([self._dataset[index] for index in indices]))
        if self._device.type == "cuda":
            rows = rows.pin_memory()
        rows = rows.to(self._device, non_blocking=True)
        return Batch(rows[:, :-1], rows[:, 1:])
