"""The texts that Triton's Python back end continues, all together, and the pieces of their answers.

It lies beside `model.py` on the server. Shapes: B texts, T tokens, H heads, D numbers of a head.
"""
# ruff: noqa: N803, N806 (names that end in their shape)

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how bytes are decoded that are not a character yet
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a byte's token in the tokenizers that have them apart


@dataclass(eq=False)
class Job:
    """A prompt that is being answered."""

    ids: list[int]
    max_tokens: int
    made: list[int] = field(default_factory=list)
    ended: bool = False


class Rows:
    """The prompts that the model continues together; they join and leave between two tokens."""

    def __init__(self, model: Any, end: int) -> None:
        ends = model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        self._model, self._pad = model, end
        self.jobs: list[Job] = []
        self._mask_BT = torch.zeros((0, 0), dtype=torch.long, device=model.device)
        self._cache: list[tuple[torch.Tensor, torch.Tensor]] = []  # a layer's keys, values: BHTD

    @property
    def dtype(self) -> torch.dtype:
        """The weights' type in memory."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    @torch.inference_mode()
    def join(self, jobs: Sequence[Job]) -> None:
        """Read new prompts and make the first token of each; if that fails, none has joined."""
        longest = max(len(job.ids) for job in jobs)
        ids_BT = torch.full((len(jobs), longest), self._pad)
        mask_BT = torch.zeros_like(ids_BT)
        for row, job in enumerate(jobs):  # pad on the left, so all continue at the same place
            ids_BT[row, longest - len(job.ids) :] = torch.tensor(job.ids)
            mask_BT[row, longest - len(job.ids) :] = 1
        mask_BT = mask_BT.to(self._model.device)
        tokens, cache = self._forward(ids_BT, mask_BT, [])
        length = max(longest, self._mask_BT.shape[1])
        if self._cache:
            cache = [
                (_joined(keys, new_keys, length), _joined(values, new_values, length))
                for (keys, values), (new_keys, new_values) in zip(self._cache, cache, strict=True)
            ]
            both = (self._mask_BT, mask_BT)
            mask_BT = torch.cat([pad(mask, (length - mask.shape[1], 0)) for mask in both])
        self._mask_BT, self._cache = mask_BT, cache
        self.jobs += jobs
        self._add(jobs, tokens)

    @torch.inference_mode()
    def step(self) -> None:
        """Make the next token of each."""
        if not self.jobs:
            return
        ids_B1 = torch.tensor([job.made[-1:] for job in self.jobs])
        mask_BT = pad(self._mask_BT, (0, 1), value=1)
        tokens, self._cache = self._forward(ids_B1, mask_BT, self._cache)
        self._mask_BT = mask_BT
        self._add(self.jobs, tokens)

    def answer(self, jobs: Sequence[Job]) -> None:
        """Answer prompts to the end, with nobody else's in between."""
        try:
            self.join(jobs)
            self.drop_ended()
            while self.jobs:
                self.step()
                self.drop_ended()
        finally:  # after an error too
            for job in jobs:
                job.ended = True
            self.drop_ended()

    def drop_ended(self) -> None:
        """Let those leave that ended, and free their memory."""
        stay = [row for row, job in enumerate(self.jobs) if not job.ended]
        if len(stay) == len(self.jobs):
            return
        self.jobs = [self.jobs[row] for row in stay]
        if not self.jobs:
            self._cache, self._mask_BT = [], self._mask_BT[:0, :0]
            return
        mask_BT = self._mask_BT[stay]
        first = int(mask_BT.any(0).int().argmax())  # before it, only padding is left
        self._mask_BT = mask_BT[:, first:]
        self._cache = [
            (keys[stay, :, first:], values[stay, :, first:]) for keys, values in self._cache
        ]

    def _forward(
        self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, cache: list[Any]
    ) -> tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return the most likely next token of each row, and the cache with the given tokens."""
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
        made = self._model(
            ids_BT.to(self._model.device),
            attention_mask=mask_BT,
            position_ids=positions_BT,
            past_key_values=DynamicCache(cache or None),
            use_cache=True,
            logits_to_keep=1,
        )
        tokens = made.logits[:, -1].argmax(-1).tolist()
        return tokens, [(layer.keys, layer.values) for layer in made.past_key_values.layers]

    def _add(self, jobs: Sequence[Job], tokens: Sequence[int]) -> None:
        for job, token in zip(jobs, tokens, strict=True):
            job.made.append(token)
            job.ended = token in self._ends or len(job.made) == job.max_tokens


def _joined(old_BHTD: torch.Tensor, new_BHTD: torch.Tensor, length: int) -> torch.Tensor:
    both = (old_BHTD, new_BHTD)
    return torch.cat([pad(each, (0, 0, length - each.shape[2], 0)) for each in both])


class Pieces:
    """Cuts an answer into pieces of text which no later token changes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # A token's text can depend on the one before it, so the last piece's are decoded with it.
        self._before = 0  # the first token of the last piece
        self._after = 0  # the first token after it
        self._sent = 0  # how many characters since `_before` are sent

    def next(self, job: Job) -> str:
        """Return the text that was added since the last piece; it may be empty."""
        if not job.ended and self._is_open(job.made[-1]):
            return ""
        text = decoded(self._tokenizer, job.made[self._before :])
        certain = text if job.ended else text.removesuffix(_UNFINISHED)
        piece = certain[self._sent :]
        self._sent += len(piece)
        if piece and certain == text:
            self._before, self._after = self._after, len(job.made)
            self._sent = len(decoded(self._tokenizer, job.made[self._before :]))
        return piece

    def _is_open(self, token: int) -> bool:
        """Whether a next token can change the text of those up to this one as a whole.

        Bytes in a row become characters together, and tokens without text do not end the row.
        """
        if not decoded(self._tokenizer, [token]):
            return True
        return _BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(token)) is not None


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of an answer's tokens."""
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text
