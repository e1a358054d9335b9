from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.loading.dataloader import IGNORED, Batch, TokenLoader
from pipelines.loading.sampler import Mixture, mixed_samples, samples
from pipelines.loading.token_dataset import TokenDataset
from pipelines.run.records import MixturePart, Split

CPU = torch.device("cpu")


def rows(dataset: TokenDataset) -> list[list[int]]:
    """Every sample by its number: its inputs, and the last target."""
    loader = load(dataset, len(dataset), 64)
    order = samples(5, 0, 0, 1, len(dataset), len(dataset))
    found = [row for batch, _ in loader.micro_batches(0) for row in whole(batch)]
    return [found[place] for place in np.argsort(order)]


def whole(batch: Batch) -> list[list[int]]:
    return torch.cat([batch.inputs_BS, batch.targets_BS[:, -1:]], 1).tolist()


def load(
    dataset: TokenDataset, global_batch: int, micro_batch: int, rank: int = 0, world: int = 1
) -> TokenLoader:
    return TokenLoader(
        dataset,
        seed=5,
        global_batch=global_batch,
        micro_batch=micro_batch,
        dp_rank=rank,
        dp_world=world,
        device=CPU,
    )


def test_samples_overlap_by_one_token_and_stay_in_their_shard(
    tmp_path: Path, write_split: Callable[..., Split]
) -> None:
    split = write_split([[[range(10)]], [[[7, 7]]], [[range(100, 109)]]])
    assert rows(TokenDataset(tmp_path, split, sequence_length=4)) == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [100, 101, 102, 103, 104],
        [104, 105, 106, 107, 108],
    ]


@pytest.mark.parametrize(("dtype", "highest"), [("<u2", 65_499), ("<i4", 2_000_000)])
def test_batches_are_what_the_shards_say(
    tmp_path: Path, write_split: Callable[..., Split], dtype: str, highest: int
) -> None:
    """Against a plain reading of the files, for either type of id and several shards."""
    ids = np.random.default_rng(1).integers(0, highest + 1, 2000)
    ids[:3] = highest
    split = write_split([[[ids[:1200]]], [[ids[1200:]]]], dtype=dtype)
    plain = [
        shard[start : start + 33].tolist()
        for shard in (ids[:1200], ids[1200:])
        for start in range(0, len(shard) - 32, 32)
    ]
    dataset = TokenDataset(tmp_path, split, sequence_length=32)
    for step in range(6):
        order = samples(5, step, 0, 1, 14, len(dataset))
        batches = [batch for batch, _ in load(dataset, 14, 4).micro_batches(step)]
        assert [len(batch.inputs_BS) for batch in batches] == [4, 4, 4, 2]
        assert all(batch.inputs_BS.dtype == torch.int64 for batch in batches)
        assert all(torch.equal(b.inputs_BS[:, 1:], b.targets_BS[:, :-1]) for b in batches)
        assert [row for b in batches for row in whole(b)] == [plain[number] for number in order]


@pytest.mark.parametrize("kind", ["auto", "mmap", "pinned", "gds"])
def test_every_reader_gives_the_same_batches(tmp_path: Path, random_split: Split, kind) -> None:
    """Without a GPU, `gds` falls back to the pinned reader."""
    expected = rows(TokenDataset(tmp_path, random_split, 16))
    dataset = TokenDataset(tmp_path, random_split, 16, reader=kind)
    assert rows(dataset) == expected


def test_masked_targets_are_ignored(tmp_path: Path, write_split: Callable[..., Split]) -> None:
    """The mask is of the token that is predicted, not of the one that predicts."""
    split = write_split([[[range(9)]]], masks=[[1, 0, 1, 1, 0, 0, 1, 0, 1]])
    dataset = TokenDataset(tmp_path, split, sequence_length=4)
    loader = load(dataset, 2, 2)
    assert loader.has_mask
    batch, _ = next(loader.micro_batches(0))
    targets = dict(zip(batch.inputs_BS[:, 0].tolist(), batch.targets_BS.tolist(), strict=True))
    assert targets == {0: [IGNORED, 2, 3, IGNORED], 4: [IGNORED, 6, IGNORED, 8]}
    assert sorted(batch.inputs_BS.tolist()) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_mask_on_some_shards_only_is_refused(
    tmp_path: Path, write_split: Callable[..., Split]
) -> None:
    split = write_split([[[range(9)]], [[range(9)]]], masks=[[1] * 9, None])
    with pytest.raises(UserError, match="some shards have a loss mask"):
        TokenDataset(tmp_path, split, sequence_length=4)


def test_a_packed_sample_is_one_document(tmp_path: Path, write_split: Callable[..., Split]) -> None:
    packed = [[[0, 1, 2], [3, 4]], [[10, 11, 12, 13, 14]], [[20], [21, 22, 23], [24]]]
    split = write_split([packed[:2], packed[2:]])
    dataset = TokenDataset(tmp_path, split, 4, packed_length=4, documents=True)
    assert rows(dataset) == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14], [20, 21, 22, 23, 24]]
    assert dataset.documents(np.arange(3)).tolist() == [[0, 0, 1, 1], [0] * 4, [0, 0, 0, 1]]


def test_another_packed_length_is_refused(
    tmp_path: Path, write_split: Callable[..., Split]
) -> None:
    split = write_split([[[range(9)]]])
    with pytest.raises(UserError, match=r"sequence_length = 4, .* packed for 8"):
        TokenDataset(tmp_path, split, 4, packed_length=8)


def test_documents_are_numbered_within_a_sample(
    tmp_path: Path, write_split: Callable[..., Split]
) -> None:
    """A document may begin before its sample and end after it.

    An input's number is its target's: an end-of-document token begins the next document, as it does
    where a document is scored.
    """
    lengths = [3, 1, 7, 2, 12, 5]
    ends = np.cumsum(lengths)
    documents = [[range(end - length, end)] for end, length in zip(ends, lengths, strict=True)]
    split = write_split([documents, documents])
    dataset = TokenDataset(tmp_path, split, 6, documents=True)
    batch, _ = next(load(dataset, len(dataset), 64).micro_batches(0))
    assert batch.documents_BS is not None
    for targets, numbers in zip(batch.targets_BS, batch.documents_BS, strict=True):
        of = np.searchsorted(ends, targets.numpy(), side="right")  # tokens are their own positions
        assert numbers.tolist() == [int((np.diff(of[: i + 1]) > 0).sum()) for i in range(6)]
    assert dataset.most_documents == 1 + batch.documents_BS.max() == 3


@pytest.mark.parametrize("seed", range(8))
def test_no_sample_holds_more_documents_than_are_counted(
    seed: int, tmp_path: Path, write_split: Callable[..., Split]
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 6, 12).tolist()
    split = write_split([[[range(length)] for length in part] for part in (lengths, lengths[:7])])
    dataset = TokenDataset(tmp_path, split, 5, documents=True)
    assert dataset.most_documents == 1 + dataset.documents(np.arange(len(dataset))).max()


def test_documents_that_are_not_told_apart_are_one(
    tmp_path: Path, write_split: Callable[..., Split]
) -> None:
    split = write_split([[[[token]] for token in range(9)]])
    assert TokenDataset(tmp_path, split, 4).most_documents == 1
    assert TokenDataset(tmp_path, split, 4, documents=True).most_documents == 4


@pytest.mark.parametrize("name", ["train-00001.bin", "train-00001.idx", "train-00001.mask"])
def test_a_flipped_byte_is_named(
    tmp_path: Path, write_split: Callable[..., Split], name: str
) -> None:
    split = write_split([[[range(50)]], [[range(50)]]], masks=[[1] * 50] * 2)
    content = bytearray((tmp_path / name).read_bytes())
    content[20] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}.*md5"):
        TokenDataset(tmp_path, split, sequence_length=4)


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.idx", "train-00000.mask"])
def test_a_missing_file_is_named(
    tmp_path: Path, write_split: Callable[..., Split], name: str
) -> None:
    split = write_split([[[range(50)]]], masks=[[1] * 50])
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=rf"{name}.*missing"):
        TokenDataset(tmp_path, split, sequence_length=4)


def test_processes_share_the_verification(tmp_path: Path, random_split: Split) -> None:
    """Each shard is hashed by one of them; a damaged one is found by just that one."""
    path = tmp_path / "train-00001.bin"
    path.write_bytes(bytes(path.stat().st_size))
    for rank in (0, 2):
        TokenDataset(tmp_path, random_split, 16, part=(rank, 3))
    with pytest.raises(UserError, match=r"train-00001\.bin.*md5"):
        TokenDataset(tmp_path, random_split, 16, part=(1, 3))


def test_too_little_text_says_how_much(tmp_path: Path, write_split: Callable[..., Split]) -> None:
    split = write_split([[[[1, 2, 3]]]])
    with pytest.raises(UserError, match=r"3 training tokens are fewer than .* 9"):
        TokenDataset(tmp_path, split, sequence_length=8)


@pytest.mark.parametrize("world", [2, 3, 7])
def test_workers_share_each_step_without_a_rest(
    tmp_path: Path, write_split: Callable[..., Split], world: int
) -> None:
    dataset = TokenDataset(tmp_path, write_split([[[range(256)]]]), sequence_length=4)

    def of_step(step: int, rank: int, world: int) -> list[list[int]]:
        batches = list(load(dataset, 7, 2, rank, world).micro_batches(step))
        assert [last for _, last in batches] == [False] * (len(batches) - 1) + [True]
        return [row for batch, _ in batches for row in whole(batch)]

    for step in (0, 9, 30):  # 63 samples: the second epoch begins at step 9
        parts = [row for rank in range(world) for row in of_step(step, rank, world)]
        assert parts == of_step(step, 0, 1)


def test_reading_ahead_changes_no_step(tmp_path: Path, random_split: Split) -> None:
    """Whatever was asked for before: in order, again, backwards, after a jump, half a step."""
    dataset = TokenDataset(tmp_path, random_split, 16)
    kept = load(dataset, 7, 2)
    next(kept.micro_batches(1))
    for step in (0, 1, 2, 2, 1, 40, 41, 3):
        fresh = [whole(batch) for batch, _ in load(dataset, 7, 2).micro_batches(step)]
        assert [whole(batch) for batch, _ in kept.micro_batches(step)] == fresh


def test_nothing_is_read_behind_the_last_step(tmp_path: Path, random_split: Split) -> None:
    dataset = TokenDataset(tmp_path, random_split, 16)
    loader = TokenLoader(
        dataset,
        seed=5,
        global_batch=4,
        micro_batch=1,
        dp_rank=0,
        dp_world=1,
        device=CPU,
        steps=3,
    )
    read: list[list[int]] = []
    tokens = dataset.tokens
    dataset.tokens = lambda share: read.append(share.tolist()) or tokens(share)  # type: ignore
    for step in range(3):
        list(loader.micro_batches(step))
    assert [one for each in read for one in each] == [
        one for step in range(3) for one in samples(5, step, 0, 1, 4, len(dataset)).tolist()
    ]


def test_document_numbers_go_to_a_gpu_through_pinned_memory(
    tmp_path: Path, write_split: Callable[..., Split], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = TokenDataset(tmp_path, write_split([[[range(9)]]]), 4, documents=True)
    loader = load(dataset, 1, 1)
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda each: pinned.append(each) or each)
    loader._device = torch.device("meta")  # as a GPU is: not the host's memory
    loader.reader = SimpleNamespace(read=lambda ranges, out: lambda: None)  # type: ignore
    begun = loader._begin(np.array([0]), (0, 0), is_last=True)
    assert [each.tolist() for each in pinned] == [[[0, 0, 0, 0]]]
    assert begun.documents is not None and begun.documents.device.type == "meta"


def test_fewer_samples_than_workers_are_refused(tmp_path: Path, random_split: Split) -> None:
    dataset = TokenDataset(tmp_path, random_split, sequence_length=4)
    with pytest.raises(UserError, match=r"global_batch_size\(7\).*8 data-parallel"):
        load(dataset, 7, 2, rank=0, world=8)


def part(name: str, weight: int, shards: int) -> MixturePart:
    return MixturePart(
        name=name,
        version=1,
        git_revision="0" * 40,
        directory_hash="0.dir",
        weight=weight,
        shards=shards,
        data={},
    )


@pytest.mark.parametrize("world", [1, 3])
def test_a_mixture_is_drawn_from_the_shards_of_each_dataset(
    tmp_path: Path, write_split: Callable[..., Split], world: int
) -> None:
    """Two shards of one dataset, whose tokens are below 100, and one of the other."""
    shards = [[[range(41)]], [[range(50, 71)]], [[range(100, 121)]]]
    parts = (part("low", 1, 2), part("high", 3, 1))
    dataset = TokenDataset(tmp_path, write_split(shards), 4, mixture=parts)
    assert dataset.mixture == Mixture((1, 3), (15, 5))
    for step in (0, 7, 90):
        found = [
            row
            for rank in range(world)
            for batch, _ in load(dataset, 8, 3, rank, world).micro_batches(step)
            for row in whole(batch)
        ]
        assert sum(row[0] >= 100 for row in found) == 6
        firsts = [*range(0, 40, 4), *range(50, 70, 4), *range(100, 120, 4)]
        order = mixed_samples(5, step, 0, 1, 8, dataset.mixture)
        assert [row[0] for row in found] == [firsts[sample] for sample in order]


def test_a_part_without_a_whole_sample_is_named(
    tmp_path: Path, write_split: Callable[..., Split]
) -> None:
    split = write_split([[[range(41)]], [[range(4)]]])
    with pytest.raises(UserError, match="short@1: its training tokens are fewer"):
        TokenDataset(tmp_path, split, 4, mixture=(part("long", 1, 1), part("short", 1, 1)))
