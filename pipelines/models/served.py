"""Loading models for inference, computed as a server will compute them.

A folder in fp32 is run by Penstock's own decoder, which agrees with transformers to 1e-4. A folder
in half precision, or quantised by torchao, is a different model from its source and must be
measured as itself, so it is run by transformers in the type of its files.

On a CPU, fp32 matrix products use oneDNN, which is part of torch. torch's own `linear` uses MKL,
which ignores AVX-512 on AMD's processors: on one EPYC core oneDNN is 2.2 times as fast (220 versus
97 GFLOP/s, 1024 x 320 x 896). Its operator is the one that torch.compile emits; results differ only
by the rounding of sums.

Most CPUs have no fast products of bfloat16: on one core torch reaches 10 to 30 GFLOP/s with AVX2 or
AVX-512, and 70 to 135 in fp32. There (see `has_bfloat16_products`), a linear layer in bfloat16
computes with oneDNN in fp32, from the same stored numbers. The conversion to fp32 is exact, a
product of two such numbers too, and the result is rounded to bfloat16 at the points where a
server's kernel rounds. So the weights and the roundings are those of the served model; only the
order of fp32 sums differs.

A process keeps the model that it used last in memory, as an evaluation is many short tasks over one
model, whose loading may take longer than any of them.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from pipelines.loading.dataloader import IGNORED
from pipelines.models.config import DecoderConfig
from pipelines.models.model_folder import (
    CONFIG,
    has_int4_kernels,
    is_compressed,
    is_quantized,
    load_config,
    stated_type,
    weight_files,
)
from pipelines.models.pretrained import load_pretrained
from pipelines.models.transformer import Transformer

if TYPE_CHECKING:
    from torchao.quantization import Int4Tensor


def use_onednn(model: nn.Module) -> None:
    """Make a model's linear layers on the CPU compute in fp32 with oneDNN, if torch has it.

    Layers in bfloat16 stay as they are on a CPU that has units for such products, and so do layers
    of other types. The layers then have no gradients.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for module in model.modules():
        if type(module) is nn.Linear and (forward := _in_fp32(module.weight)) is not None:
            module.forward = partial(forward, module)  # type: ignore[method-assign]


def _in_fp32(weight: Any) -> Callable[[nn.Linear, Tensor], Tensor] | None:
    """Return how a layer with this weight computes in fp32; None if it should not, or can't."""
    if weight.device.type != "cpu":
        return None
    plain = type(weight) in (Tensor, nn.Parameter)
    if plain and weight.dtype == torch.float32:
        return _linear
    if weight.dtype != torch.bfloat16 or has_bfloat16_products():
        return None
    return _bfloat16_linear if plain else _int8_linear if _has_int8_rows(weight) else None


def _has_int8_rows(weight: Any) -> bool:
    """Return whether a weight is torchao's int8 with a scale for each row, as exports have it."""
    if type(weight).__name__ != "Int8Tensor":
        return False
    changed = weight.act_quant_kwargs is not None or weight.act_pre_scale is not None
    return not changed and weight.scale.numel() == len(weight)


@cache
def has_bfloat16_products() -> bool:
    """Return whether the CPU multiplies matrices of bfloat16 faster than those of fp32.

    AVX-512's bfloat16 instructions do on AMD's: 200 GFLOP/s on one EPYC core, and 100 in fp32. On
    Intel's they do not: they reach 100 GFLOP/s where fp32 reaches 135 (on one core of a Xeon that
    oneDNN was told to use no more of).
    """
    cpu = torch.cpu.get_capabilities()
    amd = str(cpu.get("cpu_name")).startswith("AMD")
    return bool(cpu.get("amx_bf16") or (amd and cpu.get("avx512_bf16")))


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    """Map [..., in] to [..., out]."""
    return _product(x, module.weight, module.bias)


def _bfloat16_linear(module: nn.Linear, x: Tensor) -> Tensor:
    """Map [..., in] to [..., out] in bfloat16, rounded where the server's kernels round."""
    bias = None if module.bias is None else module.bias.float()
    return _product(x.float(), module.weight.float(), bias).to(x.dtype)


def _int8_linear(module: nn.Linear, x: Tensor) -> Tensor:
    """Map [..., in] to [..., out] in bfloat16, rounded where torchao rounds.

    It multiplies by int8 codes, rounds, and multiplies the result by each row's scale.
    """
    weight: Any = module.weight
    summed = _product(x.float(), weight.qdata.float(), None).to(x.dtype)
    made: Tensor = summed * weight.scale.to(x.dtype).flatten()
    return made if module.bias is None else made + module.bias


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return made


# Load no file from elsewhere, no pickle and no code from the folder.
OFFLINE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
PLAIN: dict[str, Any] = {"use_safetensors": True, **OFFLINE}


class TransformersModel(nn.Module):
    """A model of transformers, called like a `Transformer` but without documents.

    Attributes:
        config: The shape that the folder's `config.json` describes.
    """

    def __init__(self, model: nn.Module, config: DecoderConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config

    def forward(self, inputs_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor:  # noqa: N803
        """Return logits [B, S, V], or with targets their summed loss in nats."""
        logits_BSV: Tensor = self.model(input_ids=inputs_BS, use_cache=False).logits  # noqa: N806
        if targets_BS is None:
            return logits_BSV
        return F.cross_entropy(
            logits_BSV.float().flatten(0, 1),
            targets_BS.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )


Model = Transformer | TransformersModel


def load_model(folder: Path, device: torch.device) -> Model:
    """Return a model to measure: in fp32 a `Transformer`, in fewer bits the one of `load_served`.

    Raises:
        UserError: see `load_pretrained`.
    """
    if is_quantized(folder) or stated_type(folder) in ("bfloat16", "float16"):
        return load_served(folder, device)
    model = load_pretrained(folder, device)
    use_onednn(model)
    return model


def load_served(folder: Path, device: torch.device) -> TransformersModel:
    """Load a folder with transformers, in the type of its files."""
    from transformers import AutoModelForCausalLM

    if is_quantized(folder):
        model = load_quantized(folder, device)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **PLAIN).to(device)
    use_onednn(model)
    return TransformersModel(model.eval(), load_config(folder))


def load_quantized(folder: Path, device: torch.device) -> nn.Module:
    """Return a quantised folder as a model of transformers, ready to compute.

    int8 always runs directly, and int4 where its kernels are installed. Elsewhere int4 weights are
    decoded to bfloat16, the same numbers that the kernels multiply by. So are those of
    compressed-tensors everywhere.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, **OFFLINE)
    if is_compressed(folder):
        config.quantization_config["dequantize"] = True
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype="auto", **PLAIN
    )
    model = model.to(device).eval()
    if not has_int4_kernels():
        from torchao.quantization import Int4Tensor

        for _, linear in block_linears(model):
            if isinstance(linear.weight, Int4Tensor):
                linear.weight = nn.Parameter(decode_int4(linear.weight), requires_grad=False)
    return model


def decode_int4(weight: "Int4Tensor") -> Tensor:
    """Return the decoded matrix [out, in] in bfloat16."""
    pairs = weight.qdata
    codes = torch.stack([(pairs << 4) >> 4, pairs >> 4], dim=-1).flatten(1)  # signed
    groups = codes.float().view(len(codes), -1, weight.block_size[1])
    scale, zero = (each.float().t().unsqueeze(-1) for each in (weight.scale, weight.zero_point))
    matrix: Tensor = (groups * scale + zero).flatten(1).to(torch.bfloat16)
    return matrix


def block_linears(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Yield linear layers but the head, which may be tied to embeddings and is never quantised."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name, module


_Files = tuple[tuple[Path, int, int], ...]
_held: dict[_Files, Model] = {}  # at most one model


def inference_device() -> torch.device:
    """Return the machine's accelerator, or its CPU; this is chosen nowhere else."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def held_model(folder: Path) -> Model:
    """Return a folder's model for inference, loaded again only when its files have changed.

    Callers share the model and must not change it.

    Raises:
        UserError: see `load_pretrained`.
    """
    files = _files(folder)
    if files not in _held:
        let_go()  # memory may not hold two models
        _held[files] = load_model(folder, inference_device()).eval()
    return _held[files]


def let_go() -> None:
    """Drop the held model, to free its memory for other work in this or another process."""
    _held.clear()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _files(folder: Path) -> _Files:
    paths = [(folder / CONFIG).resolve(), *(path.resolve() for path in weight_files(folder))]
    states = [path.stat() for path in paths]
    return tuple(
        (path, state.st_size, state.st_mtime_ns) for path, state in zip(paths, states, strict=True)
    )
