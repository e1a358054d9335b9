"""A decoder as a Hugging Face folder: safetensors and JSON, never a pickle.

`transformers` is not needed here; its `AutoModelForCausalLM` loads what `save_pretrained` writes.
"""

from pathlib import Path

import torch

from pipelines.core.errors import UserError
from pipelines.core.storage import write_json
from pipelines.models.folder import WEIGHTS, load_config, to_llama, weight_files
from pipelines.models.safetensors_files import SafetensorsFiles
from pipelines.models.transformer import Transformer

_HEAD = "lm_head.weight"
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_PREFIX = "model."  # of every tensor but the head's


def save_pretrained(model: Transformer, folder: Path, end_of_text: int | None = None) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads.

    Args:
        model: On any device; the weights are written as they are, a tied head once.
        folder: Made where missing.
        end_of_text: The token id that ends a document, and so a generation.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name if name == _HEAD else _PREFIX + name: tensor.detach().cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if not (name == _HEAD and model.config.tie_embeddings)
    }
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    special = {} if end_of_text is None else dict.fromkeys(_SPECIAL_TOKENS, end_of_text)
    write_json(folder / "config.json", to_llama(model.config) | special)
    write_json(folder / "generation_config.json", special)


def load_pretrained(folder: Path, device: torch.device | None = None) -> Transformer:
    """Read a Llama folder, ours or another's, into fp32 weights.

    Args:
        folder: In Hugging Face's format.
        device: Where each tensor is read to, straight from its file; the CPU by default.

    Raises:
        UserError: not a folder with safetensors weights of a Llama, or a tensor is missing.
    """
    device = device or torch.device("cpu")
    model = Transformer(load_config(folder)).to(device)
    files = SafetensorsFiles(weight_files(folder))
    weights = {_ours(name): place.shape for name, place in files.places.items()}
    wanted = model.state_dict()
    tied = model.config.tie_embeddings
    if tied and "embed_tokens.weight" in weights:
        weights[_HEAD] = weights["embed_tokens.weight"]
    _check_shapes(folder, {name: tuple(each.shape) for name, each in wanted.items()}, weights)
    for name, tensor in files.read(device):
        if not (tied and name == _HEAD):  # a copy of the embeddings
            wanted[_ours(name)].copy_(tensor)
    return model


def _ours(name: str) -> str:
    return name.removeprefix(_PREFIX)


def _check_shapes(
    folder: Path, wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]
) -> None:
    for name in wanted.keys() - found.keys():
        raise UserError(f"{folder}: the tensor {name} is missing from the weights")
    for name in found.keys() - wanted.keys():
        raise UserError(f"{folder}: the tensor {name} is not one of this model")
    for name, shape in found.items():
        if shape != wanted[name]:
            raise UserError(f"{folder}: {name} has shape {shape}, config.json says {wanted[name]}")
