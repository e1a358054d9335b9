"""A model of transformers behind the calls of ours, so that one code scores both."""

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from pipelines.core.storage import read_json
from pipelines.loading.dataloader import IGNORED
from pipelines.models.config import DecoderConfig
from pipelines.models.folder import CONFIG, load_config


class TransformersModel(nn.Module):
    """Called as a `Transformer` is, without documents.

    Attributes:
        config: The shape that the folder's `config.json` describes.
    """

    def __init__(self, model: nn.Module, config: DecoderConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config

    def forward(self, inputs_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor:  # noqa: N803
        """Logits [B, S, V]; with targets, the sum of their nats."""
        logits_BSV: Tensor = self.model(input_ids=inputs_BS, use_cache=False).logits  # noqa: N806
        if targets_BS is None:
            return logits_BSV
        return F.cross_entropy(
            logits_BSV.float().flatten(0, 1),
            targets_BS.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )


def load(folder: Path, device: torch.device) -> TransformersModel:
    """Load an exported folder as a server will: by transformers, in its own type."""
    from transformers import AutoModelForCausalLM

    from pipelines.export.quantized import PLAIN, load_quantized

    if "quantization_config" in read_json(folder / CONFIG):
        model = load_quantized(folder, device)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **PLAIN).to(device)
    return TransformersModel(model.eval(), load_config(folder))
