"""Megatron's own indexed dataset, in the environment of the benchmarks' peers.

Asked on stdin, as JSON: which shards to `read`, and which documents Megatron and datatrove are to
`write` into a folder, by the type of their tokens. It prints what Megatron finds in each shard.
"""

import json
import sys

import numpy as np
import torch
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder


def found(dataset: IndexedDataset) -> dict[str, object]:
    return {
        "dtype": dataset.index.dtype.__name__,
        "sizes": dataset.sequence_lengths.tolist(),
        "documents": dataset.document_indices.tolist(),
        "ids": [dataset[number].tolist() for number in range(len(dataset))],
    }


def write(folder: str, dtype: str, documents: list[list[list[int]]]) -> None:
    """A document is a list of sequences; to datatrove it is one."""
    kind = np.dtype(dtype).type
    builder = IndexedDatasetBuilder(f"{folder}/megatron-{dtype}.bin", dtype=kind)
    file = MegatronTokenizedFile(folder, f"datatrove-{dtype}", token_size=kind().itemsize)
    for sequences in documents:
        ids = [token for sequence in sequences for token in sequence]
        builder.add_document(torch.tensor(ids), [len(sequence) for sequence in sequences])
        file.write(ids)
    builder.finalize(f"{folder}/megatron-{dtype}.idx")
    file.close()


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    for dtype, documents in asked["write"].items():
        write(asked["folder"], dtype, documents)
    json.dump([found(IndexedDataset(prefix)) for prefix in asked["read"]], sys.stdout)
