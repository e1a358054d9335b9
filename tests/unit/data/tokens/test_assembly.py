from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.storage import md5
from pipelines.data.tokens.assembly import Piece, assemble, plan_shards
from pipelines.data.tokens.tokenization import IDS_FILE, MASK_FILE, SIZES_FILE
from pipelines.loading.dataloader import Batch, TokenLoader
from pipelines.loading.token_dataset import TokenDataset
from pipelines.run.records import Split
from tests.indexed_dataset import IndexedDataset

END = 256


def whole_batches(dataset: TokenDataset) -> Iterator[tuple[Batch, bool]]:
    """All samples of a dataset, each once."""
    loader = TokenLoader(
        dataset,
        seed=0,
        global_batch=len(dataset),
        micro_batch=1,
        dp_rank=0,
        dp_world=1,
        device=torch.device("cpu"),
        steps=1,
    )
    return loader.micro_batches(0)


def write_blocks(folder: Path, blocks: list[list[int]], masked: bool = False) -> list[Path]:
    """Token blocks whose documents have these sizes; every token has a value of its own."""
    paths, token = [], 0
    for number, sizes in enumerate(blocks):
        path = folder / f"block-{number}"
        path.mkdir(parents=True)
        count = sum(sizes)
        ids = np.arange(token, token + count, dtype=np.uint16)
        ids.tofile(path / IDS_FILE)
        np.save(path / SIZES_FILE, np.array(sizes, np.int32))
        if masked:
            (ids % 2).astype(np.uint8).tofile(path / MASK_FILE)
        paths.append(path)
        token += count
    return paths


def documents(piece: Piece) -> list[int]:
    return list(np.load(piece.block / SIZES_FILE)[piece.start : piece.stop].tolist())


def rolled(sizes: list[int], shard_tokens: int) -> list[list[int]]:
    """What a writer would do that takes one document after the other."""
    shards: list[list[int]] = []
    for size in sizes:
        if not shards or sum(shards[-1]) + size > shard_tokens:
            shards.append([])
        shards[-1].append(size)
    return shards


@settings(max_examples=60)
@given(
    blocks=st.lists(st.lists(st.integers(1, 40), max_size=8), max_size=6),
    shard_tokens=st.integers(1, 60),
)
def test_shards_hold_as_many_whole_documents_as_fit(tmp_path_factory, blocks, shard_tokens) -> None:
    paths = write_blocks(tmp_path_factory.mktemp("blocks"), blocks)
    plan = plan_shards("train", paths, shard_tokens)
    planned = [[size for piece in shard.pieces for size in documents(piece)] for shard in plan]
    assert planned == rolled([size for block in blocks for size in block], shard_tokens)
    assert [shard.name for shard in plan] == [f"train-{n:05d}" for n in range(len(plan))]


def test_shards_hold_the_documents_in_order(tmp_path: Path) -> None:
    paths = write_blocks(tmp_path, [[3, 4], [5], [6, 2]], masked=True)
    plan = plan_shards("train", paths, 13)
    tokens = []
    for shard_plan in plan:
        made = assemble(shard_plan, tmp_path, vocab_size=END + 1, end_id=END, capacity=None)
        path = tmp_path / Path(made.path).name
        assert made.path == f"tokens/{shard_plan.name}.bin"
        assert made.md5 == md5(path)
        dataset = IndexedDataset(path.with_suffix(""))
        assert dataset.mask.tolist() == [token % 2 for token in dataset.tokens]
        tokens += dataset.tokens.tolist()
    assert len(plan) == 2
    assert tokens == list(range(20))


def test_packed_shards_hold_all_tokens_in_samples_of_one_length(tmp_path: Path) -> None:
    paths = write_blocks(tmp_path, [[3, 4, 9], [5, 5], [6, 2]])
    (plan,) = plan_shards("train", paths, 100)
    made = assemble(plan, tmp_path, vocab_size=END + 1, end_id=END, capacity=8)
    dataset = IndexedDataset(tmp_path / plan.name)
    assert set(np.diff(dataset.document_offsets)) == {8}
    assert made.mask_md5 == md5(tmp_path / f"{plan.name}.mask")
    predicted = dataset.tokens[dataset.mask == 1]
    assert sorted(predicted.tolist()) == list(range(34))
    assert set(dataset.tokens[dataset.mask == 0].tolist()) <= {END}


@settings(max_examples=60)
@given(
    blocks=st.lists(
        st.lists(st.tuples(st.integers(2, 15), st.integers(2, 15)), max_size=6), min_size=1
    ),
    shard_tokens=st.integers(30, 90),
)
def test_pairs_lie_whole_in_samples_chosen_even_and_rejected_odd(
    tmp_path_factory, blocks, shard_tokens
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    paths = write_blocks(folder, [[size for pair in block for size in pair] for block in blocks])
    (folder / "tokens").mkdir()
    for path in paths:  # of the first token of a conversation nothing is predicted
        mask = np.ones((path / IDS_FILE).stat().st_size // 2, np.uint8)
        sizes = np.load(path / SIZES_FILE)
        mask[np.cumsum(sizes) - sizes] = 0
        mask.tofile(path / MASK_FILE)
    options = {"vocab_size": 1 << 15, "end_id": END, "capacity": 30, "pairs": True}
    plans = plan_shards("train", paths, shard_tokens, pairs=True)
    shards = [assemble(plan, folder / "tokens", **options) for plan in plans]
    wanted = [size for block in blocks for pair in block for size in pair]
    assert bool(shards) == bool(wanted)
    if not shards:
        return
    total = sum(shard.tokens for shard in shards)
    split = Split(documents=len(wanted) // 2, bytes=0, tokens=total, shards=tuple(shards))
    dataset = TokenDataset(folder, split, 29, packed_length=29, documents=True)
    numbers = dataset.documents(np.arange(len(dataset)))
    assert numbers.max() < dataset.most_documents
    begins = np.cumsum(wanted) - wanted  # every token has a value of its own
    found: list[int] = []
    for batch, _ in whole_batches(dataset):
        assert batch.documents_BS is not None
        for targets, documents in zip(batch.targets_BS, batch.documents_BS, strict=True):
            spoken = {n: targets[(documents == n) & (targets >= 0)].tolist() for n in range(31)}
            held = [number for number, tokens in spoken.items() if tokens]
            assert held == list(range(len(held)))
            assert len(held) % 2 == 0
            for number in held:
                conversation = int(np.searchsorted(begins, spoken[number][0], side="right")) - 1
                assert conversation % 2 == number % 2
                begin = int(begins[conversation])
                assert spoken[number] == list(range(begin + 1, begin + wanted[conversation]))
                found.append(conversation)
            ones, others = found[-len(held) :: 2], found[1 - len(held) :: 2]
            assert [number + 1 for number in ones] == others
    assert sorted(found) == list(range(len(wanted)))
