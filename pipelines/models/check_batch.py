"""A few sequences with the loss that the trained model had on them before it was written.

Whoever reads the written model can tell by them whether it is the one that was trained.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pipelines.loading.dataloader import IGNORED

CHECK_BATCH = "check_batch.safetensors"  # in the outputs of train
_FACTS = "penstock"


@dataclass(frozen=True)
class CheckBatch:
    """Sequences of the training data, each read as one document.

    Attributes:
        inputs_BS: Token ids, int64.
        targets_BS: The token after each input, int64, or `IGNORED`.
        nats: The loss of the trained model, summed over all targets.
        precision: That of the model's products: fp32, tf32, bf16, fp16 or fp8.
        length: Of the sequences that were trained on, in tokens; these may be shorter.
    """

    inputs_BS: Tensor  # noqa: N815
    targets_BS: Tensor  # noqa: N815
    nats: float
    precision: str
    length: int

    @property
    def targets(self) -> int:
        """How many tokens are predicted."""
        return int((self.targets_BS != IGNORED).sum())

    def save(self, path: Path) -> None:
        """Write one safetensors file."""
        from safetensors.torch import save_file

        facts = {"nats": self.nats, "precision": self.precision, "length": self.length}
        tensors = {"inputs": self.inputs_BS, "targets": self.targets_BS}
        save_file(tensors, path, metadata={_FACTS: json.dumps(facts)})

    @classmethod
    def load(cls, path: Path) -> "CheckBatch":
        """Read what `save` wrote."""
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()[_FACTS])
            return cls(file.get_tensor("inputs"), file.get_tensor("targets"), **facts)
