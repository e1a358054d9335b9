"""Steps of a small decoder on random tokens, for what benchmarks its state."""

import time
from collections.abc import Callable
from typing import Any

import torch

from pipelines.models.config import DecoderConfig
from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import Parallelized


class Training:
    """A decoder with AdamW on the best device there is."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.decoder = Transformer(DecoderConfig(**options["shape"]))
        self.decoder.init_weights(seed=0)
        self.decoder.to(self.device)
        self.model = Parallelized(build_mesh(Layout(), self.device), [self.decoder])
        self.optimizer = torch.optim.AdamW(self.decoder.parameters(), fused=True)
        shape = (options.get("batch", 1), options["shape"]["context_length"] + 1)
        self._tokens = torch.randint(options["shape"]["vocab_size"], shape, device=self.device)

    def step(self, before_update: Callable[[], None] = lambda: None) -> float:
        """One step; seconds of it."""
        began = time.perf_counter()
        self.decoder(self._tokens[:, :-1], targets_BS=self._tokens[:, 1:]).backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.synchronize()
        return time.perf_counter() - began

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @property
    def state_bytes(self) -> int:
        """Of weights and moments."""
        return 3 * sum(each.nbytes for each in self.decoder.parameters())
