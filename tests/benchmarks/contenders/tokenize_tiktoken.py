"""tiktoken itself, in two threads: its batch call, or its call for numpy arrays in a pool."""

import base64
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.tokenize_check import check, documents

BATCH = 2000  # documents whose ids are held at once: as Python lists, they are large


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    texts = documents(folder)
    lines = (line.split() for line in (folder / "ranks.tiktoken").read_text().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    encoding = tiktoken.Encoding(
        "gpt2-like",
        pat_str=r50k_pat_str,  # GPT-2's pattern as tiktoken tunes it
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 0},
    )
    pool = ThreadPoolExecutor(2)
    one = partial(encoding.encode_to_numpy, disallowed_special=())

    def encoded() -> Iterable[Any]:
        if options["numpy"]:
            yield from pool.map(one, texts)
            return
        for start in range(0, len(texts), BATCH):
            yield from encoding.encode_ordinary_batch(texts[start : start + BATCH], num_threads=2)

    check(options, encoded())

    def run_round() -> tuple[float, dict[str, Any]]:
        return options["bytes"] / 1e6, {"tokens": sum(map(len, encoded()))}

    return run_round


if __name__ == "__main__":
    serve(prepare)
