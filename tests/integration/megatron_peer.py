"""Megatron's own indexed dataset, in the environment of the benchmarks' peers.

`read PREFIX...` prints what Megatron finds in each shard as JSON. `write FOLDER DTYPE...` lets
Megatron and datatrove write the documents that stdin holds for each type as JSON.
"""

import json
import sys

import numpy as np
import torch
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder


def read(*prefixes: str) -> None:
    json.dump([found(IndexedDataset(prefix)) for prefix in prefixes], sys.stdout)


def found(dataset: IndexedDataset) -> dict[str, object]:
    return {
        "dtype": dataset.index.dtype.__name__,
        "sizes": dataset.sequence_lengths.tolist(),
        "documents": dataset.document_indices.tolist(),
        "ids": [dataset[number].tolist() for number in range(len(dataset))],
    }


def write(folder: str, *dtypes: str) -> None:
    """A document is a list of sequences; to datatrove it is one."""
    for dtype, documents in zip(dtypes, json.load(sys.stdin), strict=True):
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
    {"read": read, "write": write}[sys.argv[1]](*sys.argv[2:])
