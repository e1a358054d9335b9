"""Export for llama.cpp: one file in GGUF with the weights, the tokenizer and the chat template.

llama.cpp has a fixed graph for each family. A model that it would compute otherwise is refused.

The weights keep the registered type by default, so that nothing is rounded: with fp32 weights and
an fp32 cache of keys and values, llama.cpp's greedy tokens are those of transformers. llama.cpp
rounds what it multiplies fp16 or bf16 weights with to their type, and computes GELU by its tanh
form from a table in fp16.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from pipelines.core.errors import UserError
from pipelines.data.tokens.tokenizer import Encoder
from pipelines.export.gguf_tokenizer import add_tokenizer
from pipelines.export.source import check_whole, companion_files
from pipelines.models.config import DecoderConfig
from pipelines.models.families import find_family
from pipelines.models.model_folder import INDEX, load_config
from pipelines.models.pretrained import (
    load_pretrained,
    load_weights,
    named_places,
    save_pretrained,
)
from pipelines.models.rotary import rotary_frequencies
from pipelines.models.safetensors_files import SafetensorsFiles
from pipelines.models.transformer import Transformer
from pipelines.registry.registry import LINEAGE

if TYPE_CHECKING:
    import numpy.typing as npt
    from gguf import GGMLQuantizationType, GGUFWriter

Weights = Literal["own", "f16", "q8_0"]
FILE = "model.gguf"

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
}
_INTERLEAVED = "llama"  # it rotates features 2i and 2i + 1 of a head, not i and i + R/2
_QUERIES_KEYS = ("q_proj", "k_proj")
# Several are one tensor, one after the other.
_QKV: dict[str, tuple[str, ...]] = {"attn_qkv": (*_QUERIES_KEYS, "v_proj")}
_FUSED = {"gpt2": _QKV, "gptneox": _QKV, "phi3": _QKV | {"ffn_up": ("gate_proj", "up_proj")}}
_ALIASES = {"embed_positions": "wpe", "lm_head": "lm_head"}  # which gguf has no Llama's name for
_POSITIONS = ("embed_positions.weight", "position_embd.weight")  # ours and llama.cpp's name
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # general.file_type


def export_gguf(source: Path, folder: Path, weights: Weights, name: str) -> int:
    """Write `model.gguf`, which llama.cpp serves, with the model card and lineage beside it.

    The whole model is in memory meanwhile, in the type of its files. Vectors are written in fp32.

    Args:
        source: A registered folder.
        folder: An existing folder that receives the files.
        weights: The type of the matrices: the registered one, fp16, or 8 bits with a scale for 32
            weights of a row.
        name: The model's name in the file.

    Returns:
        The context in tokens. It is the sliding window where that is less and in all layers, since
        llama.cpp has none for these families.

    Raises:
        UserError: See `source.check_whole` and `gguf_tokenizer.add_tokenizer`; or llama.cpp does
            not compute such a model, or a weight is too large for fp16.
    """
    import gguf

    paths = check_whole(source)
    config = load_config(source)
    _check(config, source)
    writer = gguf.GGUFWriter(None, _ARCHITECTURES[config.family])
    writer.add_name(name)
    context = config.context_length
    if config.full_attention_every is None:
        context = min(context, config.sliding_window or context)
    _add_shape(writer, config, context)
    add_tokenizer(writer, source, config.vocab_size)
    model = _load(source, config, paths)
    kind = _kind(model, weights)
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor_name, tensor in _tensors(model):
        written = _written_type(tensor_name, tensor, kind)
        size = math.prod(gguf.quants.quant_shape_to_byte_shape(tensor.shape, written))
        writer.add_tensor_info(tensor_name, tensor.shape, np.dtype("float32"), size, written)
    writer.write_header_to_file(folder / FILE)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor_name, tensor in _tensors(model):
        writer.write_tensor_data(_encoded(tensor_name, tensor, kind))
    writer.close()
    for path in companion_files(source):
        if path.suffix == ".md" or path.name == LINEAGE:
            shutil.copyfile(path, folder / path.name)
    return context


def write_rounded(source: Path, folder: Path, weights: Weights) -> None:
    """Write a copy for transformers with the numbers that `export_gguf` writes, in fp32.

    It is measured in place of the file, which transformers does not load. What llama.cpp rounds as
    it computes is not in it.

    Args:
        source: A registered folder that `export_gguf` takes.
        folder: An existing folder that receives the files.
        weights: As of `export_gguf`.
    """
    import gguf

    model = load_pretrained(source)
    kind = _kind(model, weights)
    places: dict[str, Any] = named_places(model)
    for name, tensor in places.items():
        written = _written_type(name, tensor, kind)
        decoded = gguf.quants.dequantize(_encoded(name, tensor, kind), written)
        tensor.copy_(torch.from_numpy(decoded).view_as(tensor))
    for path in companion_files(source):
        if path.name != INDEX:
            shutil.copyfile(path, folder / path.name)
    save_pretrained(model, folder, Encoder(source).end_id)


def _check(config: DecoderConfig, source: Path) -> None:
    """Refuse a model for which llama.cpp has no graph, or one that computes something else."""
    name = _ARCHITECTURES.get(config.family)
    activations: tuple[str, ...] = ("silu",) if config.gated else ("gelu", "gelu_tanh")
    if name == "gemma3":
        activations = ("gelu_tanh",)
    if name is None:
        problem = f"models of the family {config.family}"
    elif config.activation not in activations:
        problem = f"{config.family} models with the activation {config.activation}"
    elif config.rope_scaling is not None and name != "llama":
        problem = f"{config.family} models with scaled rotary positions"
    elif config.output_bias and name in ("qwen3", "gemma3"):
        problem = f"{config.family} models with biases in attention"
    elif config.query_pre_attn_scalar not in (None, config.head_width):
        problem = f"models with query_pre_attn_scalar = {config.query_pre_attn_scalar:g}"
    elif config.head_dim is not None and name == "qwen2":
        problem = f"qwen2 models with heads of {config.head_dim} features"
    else:
        return
    raise UserError(
        f"{source}: llama.cpp cannot run {problem}; use --format huggingface, with which "
        "vLLM and transformers serve it"
    )


def _load(source: Path, config: DecoderConfig, paths: list[Path]) -> Transformer:
    """Read the weights in the type of the files; in fp32 if they have several."""
    types = {place.dtype for place in SafetensorsFiles(paths).places.values()}
    with torch.device("meta"):
        model = Transformer(config)
    own = types.pop() if len(types) == 1 else torch.float32
    model.to(own if own in _TYPES else torch.float32).to_empty(device="cpu")
    load_weights(model, source)
    return model


def _kind(model: Transformer, weights: Weights) -> str:
    return _TYPES[next(model.parameters()).dtype] if weights == "own" else weights.upper()


def _add_shape(writer: "GGUFWriter", config: DecoderConfig, context: int) -> None:
    import gguf

    writer.add_context_length(context)
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.layers)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.hidden)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_width)
    writer.add_value_length(config.head_width)
    if config.norm == "rms":
        writer.add_layer_norm_rms_eps(config.norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_eps)
    if config.positions == "rotary":
        writer.add_rope_dimension_count(config.rotary_width)
        writer.add_rope_freq_base(config.rope_theta)
    if config.rope_divisor != 1:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_divisor)
    if config.full_attention_every and config.sliding_window and config.local_rope_theta:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(config.full_attention_every)
        writer.add_rope_freq_base_swa(config.local_rope_theta)
    if config.family == "gpt_neox":
        writer.add_parallel_residual(config.parallel_residual)


def _tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield the file's tensors with their names, one at a time where llama.cpp's layout differs."""
    import gguf

    config = model.config
    architecture = _ARCHITECTURES[config.family]
    (key,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(key, config.layers)
    places: dict[str, Any] = named_places(model)
    renamed = find_family(config.family).names.inside if architecture == "gemma3" else {}
    together = _FUSED.get(architecture, {}).items()
    for name, tensor in places.items():
        module, _, kind = name.rpartition(".")
        block = f"blk.{name.split('.')[1]}"
        if fused := [each for each in together if module.endswith(each[1])]:
            ((whole, parts),) = fused
            if module.endswith(parts[0]):
                found = [places[name.replace(parts[0], each)] for each in parts]
                yield f"{block}.{whole}.{kind}", torch.cat(found)
                if architecture == "gptneox" and not config.qkv_bias:  # it demands biases
                    yield f"{block}.attn_qkv.bias", torch.zeros(3 * config.width)
                    yield f"{block}.attn_output.bias", torch.zeros(config.width)
            continue
        if architecture == _INTERLEAVED and module.endswith(_QUERIES_KEYS):
            tensor = _interleaved(tensor, config.head_width)
        if config.zero_centred_norms and tensor.ndim == 1:
            tensor = 1 + tensor.float()  # llama.cpp multiplies by the whole
        *layer, inside = module.split(".", 2)
        module = ".".join((*layer, renamed.get(inside, inside)))
        stored = names.get_name(_ALIASES.get(module, f"model.{module}"))
        yield f"{stored}.{kind}", tensor
    if architecture == "gptneox" and config.tie_embeddings:  # it demands a head
        yield "output.weight", places["embed_tokens.weight"]
    if config.rope_scaling is not None:
        plain = rotary_frequencies(replace(config, rope_scaling=None))
        yield "rope_freqs.weight", plain / rotary_frequencies(config)


def _interleaved(x: Tensor, head_width: int) -> Tensor:
    """Move features i and i + R/2 of each head of [N x H, X] beside each other."""
    halves = x.reshape(-1, 2, head_width // 2, *x.shape[1:])
    return halves.transpose(1, 2).reshape(x.shape)


def _written_type(name: str, tensor: Tensor, kind: str) -> "GGMLQuantizationType":
    """Return the type of one tensor: vectors and positions stay fp32."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if tensor.ndim == 1 or name in _POSITIONS:
        return GGMLQuantizationType.F32
    wanted = GGMLQuantizationType[kind]
    block, _ = GGML_QUANT_SIZES[wanted]
    return wanted if tensor.shape[-1] % block == 0 else GGMLQuantizationType.F16


def _encoded(name: str, tensor: Tensor, kind: str) -> "npt.NDArray[Any]":
    """Return one tensor's numbers, or the bytes of their blocks."""
    import gguf

    written = _written_type(name, tensor, kind)
    with np.errstate(over="ignore"):
        data: npt.NDArray[Any] = gguf.quants.quantize(tensor.float().numpy(), written)
    if data.dtype == np.float16 and not np.isfinite(data).all():
        raise UserError(f"{name}: a weight is too large for fp16; use --format gguf")
    return data
