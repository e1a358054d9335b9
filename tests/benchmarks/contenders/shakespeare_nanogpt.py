"""A plain loop of PyTorch with nanoGPT's hyper-parameters for a CPU, written for this comparison.

Four layers of width 128 with LayerNorm, GELU and learned positions; AdamW at 1e-3 with warm-up and
cosine over 2000 steps; no dropout, no compilation.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.shakespeare_validation import validate

LAYERS, HEADS, WIDTH = 4, 4, 128
STEPS, WARM_UP, PEAK, LAST = 2000, 100, 1e-3, 1e-4
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.99), 0.1, 1.0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm_2 = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm_1(x)).split(WIDTH, dim=2)
        q, k, v = (each.view(batch, length, HEADS, -1).transpose(1, 2) for each in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self, vocabulary: int, block: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(block, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, 0, 0.02 / math.sqrt(2 * LAYERS if into_residual else 1))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        logits = self.head(self.norm(self.layers(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rate(step: int) -> float:
    if step < WARM_UP:
        return PEAK * (step + 1) / (WARM_UP + 1)
    done = (step - WARM_UP) / (STEPS - WARM_UP)
    return LAST + 0.5 * (1 + math.cos(math.pi * done)) * (PEAK - LAST)


def batches(path: Path, block: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    ids = torch.from_numpy(np.fromfile(path, np.uint16).astype(np.int64))
    while True:
        starts = torch.randint(len(ids) - block, (batch,)).tolist()
        yield (
            torch.stack([ids[start : start + block] for start in starts]),
            torch.stack([ids[start + 1 : start + 1 + block] for start in starts]),
        )


def train(model: Model, data: Iterator[tuple[Tensor, Tensor]]) -> None:
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.ndim == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=BETAS)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        model(*next(data)).backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    torch.set_num_threads(options["threads"])
    block = options["block"]
    seed = 0

    def run_round() -> tuple[float, dict[str, Any]]:
        nonlocal seed
        torch.manual_seed(seed)
        seed += 1
        model = Model(options["vocabulary"], block)
        train(model, batches(folder / "train.bin", block, options["batch"]))
        loss = validate(folder, block, lambda x, y: model(x, y) * x.numel())
        parameters = sum(each.numel() for each in model.parameters())
        return 1, {"loss": loss, "steps": STEPS, "parameters": parameters}

    return run_round


if __name__ == "__main__":
    serve(prepare)
