"""What llama.cpp makes of a file, run by the Python of its environment: a request and an answer.

Keys and values are kept in fp32, as transformers keeps them.
"""

import json
import sys
from itertools import islice

import numpy as np
from llama_cpp import GGML_TYPE_F32, Llama


def nats(model: Llama, ids: list[int]) -> float:
    """Mean loss of each token but the first."""
    model.reset()
    model.eval(ids)
    logits = model.scores[: len(ids) - 1].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return float(-logs[np.arange(len(ids) - 1), ids[1:]].mean())


def main() -> None:
    asked = json.load(sys.stdin)
    model = Llama(
        asked["model"],
        n_ctx=0,  # the file's
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        type_k=GGML_TYPE_F32,
        type_v=GGML_TYPE_F32,
        verbose=False,
    )
    found = {
        "context": model.n_ctx(),
        "ids": [
            model.tokenize(text.encode(), add_bos=True, special=True) for text in asked["texts"]
        ],
        "answers": [],
        "nats": [nats(model, ids) for ids in asked["scored"]],
    }
    for ids, tokens in asked["prompts"]:
        model.reset()
        found["answers"].append([*islice(model.generate(ids, temp=0.0), tokens)])
    json.dump(found, sys.stdout)


main()
