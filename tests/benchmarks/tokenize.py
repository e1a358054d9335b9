"""Text to token ids: ours against raw tiktoken with the same merges, two threads each.

The text is the running Python's standard library over and over, a part of its words changed in each
copy: words known by heart would be no measure. What the ids are is known from `tokenizers`, and
every contender shows in its set-up that it gives these.
"""

import base64
import hashlib
import json
import re
import sysconfig
import zlib
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.benchmarks.harness import Benchmark, Contender, Demand

TEXT_BYTES = 200_000_000
VOCABULARY = 32_000
TRAINING_DOCUMENTS = 4  # every so many-th document of the first copy: some 8 MB
_CHANGED = 8  # one in so many of the longer words


def make_data(folder: Path) -> dict[str, Any]:
    """Write the documents, a tokenizer trained on a part of them, and its table for tiktoken."""
    from pipelines.data.tokens.fast_encoder import byte_alphabet
    from pipelines.data.tokens.tokenizer import save_tokenizer, train_bpe

    library = list(_standard_library())
    tokenizer = train_bpe(library[::TRAINING_DOCUMENTS], VOCABULARY)
    save_tokenizer(tokenizer, folder / "tokenizer")
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    with (folder / "ranks.tiktoken").open("w") as file:
        for name, id_ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])[1:]:
            token = base64.b64encode(bytes(byte_of[character] for character in name)).decode()
            file.write(f"{token} {id_}\n")
    tokenizer.encode_special_tokens = True
    digest, tokens, written = hashlib.md5(usedforsecurity=False), 0, 0
    with (folder / "documents.jsonl").open("w") as file:
        for batch in _batches(library):
            file.writelines(json.dumps(text) + "\n" for text in batch)
            written += sum(len(text.encode()) for text in batch)
            for encoding in tokenizer.encode_batch_fast(batch):
                digest.update(json.dumps(encoding.ids).encode())
                tokens += len(encoding.ids)
    return {"bytes": written, "tokens": tokens, "md5": digest.hexdigest()}


def _standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts and "dist-packages" not in path.parts:
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:  # a few test files are meant to be unreadable
                continue


def _batches(library: list[str]) -> Iterator[list[str]]:
    """Copy after copy, up to `TEXT_BYTES` of text."""
    copy, left = 0, TEXT_BYTES
    while left > 0:
        change = partial(re.sub, r"[A-Za-z]{6,}", _changer(copy) if copy else lambda word: word[0])
        for start in range(0, len(library), 100):
            batch = [change(text) for text in library[start : start + 100]]
            yield batch
            left -= sum(map(len, batch))
            if left <= 0:
                return
        copy += 1


def _changer(copy: int) -> Any:
    """Gives some words another letter, the same words in the same way."""

    @cache
    def changed(word: str) -> str:
        number = zlib.crc32(word.encode(), copy)
        if number % _CHANGED:
            return word
        at = number // _CHANGED % len(word)
        return word[:at] + chr(ord("a") + number // 1000 % 26) + word[at + 1 :]

    return lambda match: changed(match[0])


BENCHMARK = Benchmark(
    name="tokenize",
    unit="MB",
    contenders=[
        Contender("penstock", "tokenize_ours"),
        Contender("tiktoken", "tokenize_tiktoken", venv="bench", options={"numpy": False}),
        Contender("tiktoken-numpy", "tokenize_tiktoken", venv="bench", options={"numpy": True}),
    ],
    demands=[Demand(over="tiktoken", ratio=0.85), Demand(over="tiktoken-numpy", ratio=0.85)],
    make_data=make_data,
)
