"""Batches of tokens on this process's device."""

# ruff: noqa: N815 (names that end in their shape)

import hashlib
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipelines.loading.sampler import check_batch, mixed_samples, samples
from pipelines.loading.sources.readers import Numbers, Ranges, Wait
from pipelines.loading.token_dataset import TokenDataset
from pipelines.recipe.recipe import Recipe

_log = logging.getLogger(__name__)
IGNORED = -100  # the target that `cross_entropy` ignores


class Batch(NamedTuple):
    """One micro-batch; each target is the token after its input, or `IGNORED`."""

    inputs_BS: Tensor  # int64
    targets_BS: Tensor  # int64
    documents_BS: Tensor | None = None  # int32: tokens with the same number attend to each other
    known_BK: Tensor | None = None  # fp32: what an objective knows of each sample beforehand


class Loader(Protocol):
    """What training reads a step's batches from; the step is its only state.

    Attributes:
        tokens_per_step: Of all processes.
        has_mask: Whether some tokens have no target.
    """

    tokens_per_step: int
    has_mask: bool

    @property
    def source(self) -> str:
        """Where the batches come from, in a word or some."""

    @property
    def states(self) -> Mapping[str, Any]:
        """What a checkpoint must hold besides the step, by name."""

    @property
    def most_documents(self) -> int:
        """The most documents that a sample may hold."""

    def micro_batches(self, step: int) -> Iterator[tuple[Batch, bool]]:
        """Yield the micro-batches of one step, each with whether it is the last one."""

    def digest(self, steps: Iterable[int]) -> str:
        """Return a hash, as 16 hex digits, of all processes' samples of some steps in order."""

    def end_window(self) -> dict[str, float]:
        """Return what is to be shown of the samples since the last call."""


class Place(Protocol):
    """A process's place among those that share a batch, such as a `Mesh`; see `TokenLoader`."""

    @property
    def device(self) -> torch.device: ...  # noqa: D102
    @property
    def dp_rank(self) -> int: ...  # noqa: D102
    @property
    def dp_world(self) -> int: ...  # noqa: D102


class TokenLoader:
    """Yields this process's micro-batches of any step; the step is its only state.

    The next micro-batches, also those of later steps, are read while one is in use.

    Attributes:
        reference: What batches say of the documents of each sample, [samples, documents].
    """

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
        steps: int | None = None,
    ) -> None:
        """Open the dataset; nothing is read before the first batch is requested.

        Args:
            dataset: The dataset to read from.
            seed: The seed of the order.
            global_batch: Samples per step over all processes.
            micro_batch: Samples per micro-batch.
            dp_rank: The rank of this process among the data-parallel ones.
            dp_world: The number of data-parallel processes.
            device: The device that gets the batches.
            steps: The number of training steps; nothing is read for later ones.
        """
        check_batch(global_batch, dp_world)
        self.tokens_per_step = global_batch * dataset.sequence_length
        self.has_mask = dataset.has_mask
        self.reader = dataset.open(device)
        _log.info("batches of %d samples, reader: %s", micro_batch, self.reader.name)
        self.reference: npt.NDArray[np.float32] | None = None
        self._dataset = dataset
        self._seed = seed
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._dp_rank = dp_rank
        self._dp_world = dp_world
        self._device = device
        self._steps = steps
        self._begun: deque[_Begun] = deque()  # in the order in which they will be requested
        self._plan: Iterator[_Begun] = iter(())

    @classmethod
    def of(cls, dataset: TokenDataset, recipe: Recipe, place: Place) -> Self:
        """Return the loader of a process that trains a recipe."""
        return cls(
            dataset,
            seed=recipe.seed,
            global_batch=recipe.train.global_batch_size,
            micro_batch=recipe.train.fixed_micro_batch_size,
            dp_rank=place.dp_rank,
            dp_world=place.dp_world,
            device=place.device,
            steps=recipe.train.steps,
        )

    @property
    def source(self) -> str:
        """The reader's name."""
        return self.reader.name

    @property
    def states(self) -> Mapping[str, Any]:
        """Nothing: the step is the whole state."""
        return {}

    def end_window(self) -> dict[str, float]:
        """Return nothing: samples are shown by their digest."""
        return {}

    @property
    def most_documents(self) -> int:
        """The most documents that a sample may hold."""
        return self._dataset.most_documents

    def micro_batches(self, step: int) -> Iterator[tuple[Batch, bool]]:
        """Yield the micro-batches of one step, each with whether it is the last one.

        The last may be smaller, as the number of workers need not divide the global batch.
        """
        is_last, number = False, 0
        while not is_last:
            begun = self._next(step, number)
            is_last, number = begun.is_last, number + 1
            yield begun.batch(), is_last

    @property
    def samples(self) -> int:
        """The number of different samples."""
        return len(self._dataset)

    def read(self, samples: Numbers) -> Batch:
        """Return samples by their numbers."""
        return self._begin(samples, (0, 0), is_last=True).batch()

    def digest(self, steps: Iterable[int]) -> str:
        """Return a hash, as 16 hex digits, of all processes' samples of some steps in order."""
        hashed = hashlib.blake2b(digest_size=8)
        for step in steps:
            hashed.update(self._samples(step, 0, 1).astype("<i8").tobytes())
        return hashed.hexdigest()

    def _next(self, step: int, number: int) -> "_Begun":
        """Return the requested micro-batch, and begin to read those after it."""
        if not self._begun or self._begun[0].place != (step, number):
            self._begun.clear()  # the run began here, or jumped to another step
            self._plan = self._begin_from(step, number)
            self._begun.append(next(self._plan))
        for begun in self._plan:
            self._begun.append(begun)
            if len(self._begun) > self.reader.ahead:
                break
        return self._begun.popleft()

    def _begin_from(self, step: int, number: int) -> Iterator["_Begun"]:
        """Yield micro-batches from a place on; each read begins when it is requested."""
        while True:
            share = self._share(step)
            for start in range(number * self._micro_batch, len(share), self._micro_batch):
                stop = start + self._micro_batch
                place = (step, start // self._micro_batch)
                yield self._begin(share[start:stop], place, is_last=stop >= len(share))
            step, number = step + 1, 0
            if step == self._steps:
                return

    def _share(self, step: int) -> Numbers:
        return self._samples(step, self._dp_rank, self._dp_world)

    def _samples(self, step: int, dp_rank: int, dp_world: int) -> Numbers:
        place = (self._seed, step, dp_rank, dp_world, self._global_batch)
        if self._dataset.mixture is None:
            return samples(*place, len(self._dataset))
        return mixed_samples(*place, self._dataset.mixture)

    def _begin(self, share: Numbers, place: tuple[int, int], *, is_last: bool) -> "_Begun":
        dataset = self._dataset
        rows, wait = self._read(dataset.tokens(share))
        mask, waits = None, [wait]
        if dataset.has_mask:
            mask, wait = self._read(dataset.mask(share))
            waits.append(wait)
        documents = self._sent(dataset.documents(share)) if dataset.has_documents else None
        known = self.reference
        reference = None if known is None else self._sent(known[share])
        ids = rows.view(torch.uint16 if dataset.dtype.itemsize == 2 else torch.int32)
        return _Begun(place, is_last, ids, mask, documents, reference, waits)

    def _sent(self, numbers: npt.NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(numbers)
        if self._device.type == "cpu":
            return tensor
        # From other memory, the host would wait for the copy.
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _read(self, ranges: Ranges) -> tuple[Tensor, Wait]:
        shape = (len(ranges.files), ranges.length)
        out = torch.empty(shape, dtype=torch.uint8, device=self._device)
        return out, self.reader.read(ranges, out)


class _Begun(NamedTuple):
    """A micro-batch that is being read."""

    place: tuple[int, int]  # its step, and its number within the step
    is_last: bool
    ids: Tensor  # [B, S + 1] as stored
    mask: Tensor | None  # [B, S]
    documents: Tensor | None  # [B, S]
    reference: Tensor | None  # [B, M]
    waits: list[Wait]

    def batch(self) -> Batch:
        """Wait for the bytes, and make ids int64 on the device, so that fewer bytes are copied."""
        for wait in self.waits:
            wait()
        ids = self.ids.to(torch.int64)
        targets = ids[:, 1:]
        if self.mask is not None:
            targets = targets.masked_fill(self.mask == 0, IGNORED)
        return Batch(ids[:, :-1], targets, self.documents, self.reference)
