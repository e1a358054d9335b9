"""Tiny models that know a handful of texts, fitted in a second or two."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from pipelines.data.tokens.tokenizer import byte_tokenizer, save_tokenizer
from pipelines.models.presets import preset
from pipelines.models.pretrained import save_pretrained
from pipelines.models.transformer import Transformer

END = 256  # of a text, for the byte tokenizer
MOST = 16  # texts in a step


def fit(folder: Path, texts: Sequence[str], steps: int, context: int = 128) -> Path:
    """A byte-level model trained on these texts, each a document, in a Hugging Face folder."""
    rows = [[END, *text.encode(), END][: context + 1] for text in texts]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [-100] * (longest - len(row)) for row in rows])
    model = Transformer(preset("llama-100k").sized(257, context))
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    order = torch.Generator().manual_seed(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 - step / steps)
        batch = tokens
        if len(tokens) > MOST:
            batch = tokens[torch.randint(len(tokens), (MOST,), generator=order)]
        logits = model(batch[:, :-1].clamp(min=0))
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=-100).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    save_pretrained(model, folder, end_of_text=END)
    save_tokenizer(byte_tokenizer(), folder)
    return folder
