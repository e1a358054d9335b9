"""The prompts of a dataset of conversations: what stands before the last answer of each."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipelines.core.errors import UserError
from pipelines.data.tokens.token_shards import ShardIndex, idx_path, mask_path, shard_prefix
from pipelines.loading.sources.shard_files import verify
from pipelines.run.records import DatasetRef, Shard


class Prompt(NamedTuple):
    """What a model answers, and the answer in the data.

    Attributes:
        number: Among the dataset's prompts.
        ids: Up to where the answer begins.
        wanted: The ids of the data's answer, with what ends it.
    """

    number: int
    ids: list[int]
    wanted: list[int]


class Prompts:
    """All prompts of the training split that leave room for an answer; only their places are held.

    Raises:
        UserError: there is none, or the shards are not all in the folder.
    """

    def __init__(
        self, folder: Path, dataset: DatasetRef, most_tokens: int, part: tuple[int, int] = (0, 1)
    ) -> None:
        """Find them.

        Args:
            folder: The shards' paths are relative to it.
            dataset: Of conversations.
            most_tokens: In a prompt.
            part: (rank, world), to verify only a part of the shards in this process.
        """
        if dataset.mixture:
            raise UserError("data.source: reinforcement reads one dataset, not a mixture; name one")
        for shard in dataset.train.shards:
            _check(folder / shard.path, shard)
        verify(folder, dataset.train.shards[part[0] :: part[1]])
        self._shards = [
            _Shard(folder / shard.path, shard, most_tokens) for shard in dataset.train.shards
        ]
        self._ends = np.cumsum([len(shard.places) for shard in self._shards])
        if not len(self):
            raise UserError(
                f"none of the {dataset.train.documents} training documents is a conversation whose "
                f"prompt has at most {most_tokens} tokens; raise data.sequence_length, or lower "
                "reinforcement.max_tokens"
            )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> Prompt:
        shard = int(np.searchsorted(self._ends, number, side="right"))
        place = number - (int(self._ends[shard - 1]) if shard else 0)
        return Prompt(number, *self._shards[shard].read(place))


def _check(path: Path, record: Shard) -> None:
    if record.mask_md5 is None:
        raise UserError(
            "reinforcement needs conversations, but the dataset is of plain text; set "
            "data.instruction.kind"
        )
    if not path.is_file():
        raise UserError(f"{path}: reinforcement reads prompts from local shards; fetch them")


class _Shard:
    """The places of a shard's prompts: where each begins, its answer begins, and it ends."""

    def __init__(self, path: Path, record: Shard, most_tokens: int) -> None:
        index = ShardIndex(idx_path(shard_prefix(path)))
        self._ids = np.memmap(path, index.dtype, mode="r") if record.tokens else np.empty(0)
        self._mask = np.memmap(mask_path(shard_prefix(path)), np.uint8, mode="r")
        begins = index.pointers() // index.dtype.itemsize
        ends = np.append(begins[1:], record.tokens)
        answers = np.flatnonzero(np.diff(self._mask.astype(np.int8), prepend=0) == 1)
        last = np.searchsorted(answers, ends) - 1
        starts = answers[last.clip(min=0)] if len(answers) else np.full_like(begins, -1)
        usable = (last >= 0) & (starts > begins) & (starts - begins <= most_tokens)
        self.places: npt.NDArray[np.int64] = np.stack([begins, starts, ends], axis=1)[usable]

    def read(self, place: int) -> tuple[list[int], list[int]]:
        begin, start, end = self.places[place].tolist()
        answer = self._ids[start:end][self._mask[start:end] == 1]
        return self._ids[begin:start].tolist(), answer.tolist()
