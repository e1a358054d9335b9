from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.core.records import Shard, Split
from pipelines.core.storage import md5
from pipelines.data.token_shards import ShardWriter
from pipelines.loading.dataloader import TokenLoader
from pipelines.loading.token_dataset import TokenDataset


def write_split(folder: Path, shards: list[list[int]]) -> Split:
    """A split of given tokens, one document a shard."""
    written = []
    for number, ids in enumerate(shards):
        writer = ShardWriter(folder / f"train-{number:05d}", vocab_size=300)
        writer.add(np.array(ids, dtype=np.uint16))
        writer.close()
        path = folder / f"train-{number:05d}.bin"
        written.append(
            Shard(
                path=path.name,
                md5=md5(path),
                index_md5=md5(path.with_suffix(".idx")),
                bytes=path.stat().st_size,
                tokens=len(ids),
            )
        )
    tokens = sum(map(len, shards))
    return Split(documents=len(shards), bytes=tokens, tokens=tokens, shards=tuple(written))


def test_samples_overlap_by_one_token_and_stay_in_their_shard(tmp_path: Path) -> None:
    split = write_split(tmp_path, [list(range(10)), [7, 7], list(range(100, 109))])
    dataset = TokenDataset(tmp_path, split, sequence_length=4)
    assert [dataset[index].tolist() for index in range(len(dataset))] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [100, 101, 102, 103, 104],
        [104, 105, 106, 107, 108],
    ]


@pytest.mark.parametrize("name", ["train-00001.bin", "train-00001.idx"])
def test_a_flipped_byte_is_named(tmp_path: Path, name: str) -> None:
    split = write_split(tmp_path, [list(range(50)), list(range(50))])
    content = bytearray((tmp_path / name).read_bytes())
    content[20] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}.*md5"):
        TokenDataset(tmp_path, split, sequence_length=4)


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.idx"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    split = write_split(tmp_path, [list(range(50))])
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=rf"{name}.*missing"):
        TokenDataset(tmp_path, split, sequence_length=4)


def test_too_little_text_says_how_much(tmp_path: Path) -> None:
    split = write_split(tmp_path, [[1, 2, 3]])
    with pytest.raises(UserError, match=r"3 training tokens are fewer than .* 9"):
        TokenDataset(tmp_path, split, sequence_length=8)


def load(dataset: TokenDataset, step: int, rank: int, world: int) -> list[list[int]]:
    loader = TokenLoader(
        dataset,
        seed=5,
        global_batch=7,
        micro_batch=2,
        dp_rank=rank,
        dp_world=world,
        device=torch.device("cpu"),
    )
    batches = list(loader.micro_batches(step))
    assert [last for _, last in batches] == [False] * (len(batches) - 1) + [True]
    for batch, _ in batches:
        assert len(batch.inputs_BS) <= 2
        assert torch.equal(batch.inputs_BS[:, 1:], batch.targets_BS[:, :-1])
    return [row.tolist() for batch, _ in batches for row in batch.inputs_BS]


@pytest.mark.parametrize("world", [2, 3, 7])
def test_workers_share_each_step_without_a_rest(tmp_path: Path, world: int) -> None:
    split = write_split(tmp_path, [list(range(256))])
    dataset = TokenDataset(tmp_path, split, sequence_length=4)
    for step in (0, 9, 30):  # 63 samples: the second epoch begins at step 9
        parts = [row for rank in range(world) for row in load(dataset, step, rank, world)]
        assert parts == load(dataset, step, 0, 1)


def test_fewer_samples_than_workers_are_refused(tmp_path: Path) -> None:
    split = write_split(tmp_path, [list(range(256))])
    dataset = TokenDataset(tmp_path, split, sequence_length=4)
    with pytest.raises(UserError, match=r"global_batch_size\(7\).*workers\(8\)"):
        load(dataset, 0, 0, 8)
