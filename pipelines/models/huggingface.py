"""A decoder as a Hugging Face folder: safetensors and JSON, never a pickle.

`transformers` is not needed here; its `AutoModelForCausalLM` loads what `save_pretrained` writes.
"""

from pathlib import Path

from torch import Tensor

from pipelines.core.errors import UserError
from pipelines.core.storage import write_json
from pipelines.models.folder import WEIGHTS, load_config, to_llama, weight_files
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


def load_pretrained(folder: Path) -> Transformer:
    """Read a Llama folder, ours or another's, into fp32 weights on the CPU.

    Raises:
        UserError: not a folder with safetensors weights of a Llama, or a tensor is missing.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    model = Transformer(load_config(folder))
    try:
        files = weight_files(folder)
        tensors = {name: t for file in files for name, t in load_file(file).items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder}: the weights can't be read: {error}") from error
    weights = {name.removeprefix(_PREFIX): tensor.float() for name, tensor in tensors.items()}
    if model.config.tie_embeddings and "embed_tokens.weight" in weights:
        weights[_HEAD] = weights["embed_tokens.weight"]
    _check_shapes(folder, model, weights)
    model.load_state_dict(weights)
    return model


def _check_shapes(folder: Path, model: Transformer, weights: dict[str, Tensor]) -> None:
    wanted = model.state_dict()
    for name in wanted.keys() - weights.keys():
        raise UserError(f"{folder}: the tensor {name} is missing from the weights")
    for name in weights.keys() - wanted.keys():
        raise UserError(f"{folder}: the tensor {name} is not one of this model")
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            found, want = tuple(tensor.shape), tuple(wanted[name].shape)
            raise UserError(f"{folder}: {name} has shape {found}, config.json says {want}")
