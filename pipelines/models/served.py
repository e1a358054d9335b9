"""A folder computed as a server will: by transformers, in the type of its files.

What trained in fp32 and is served so is scored by our own decoder, which agrees with transformers
to 1e-4. A folder in bfloat16, or quantised by torchao, is another model than the one that it was
made from, and no figure of ours may be of that one: `load_model` chooses by the folder alone.

Matrix products on a CPU by oneDNN, for models that only compute forwards.

torch's own `linear` is MKL's in fp32, which on AMD's processors leaves AVX-512 alone: of an EPYC's
core oneDNN, which is part of torch, gets 2.2 times as much (220 GFLOP/s to 97, 1024 x 320 x 896).
Its operator is the one that torch.compile emits; results agree to the rounding of sums.

The model that a process measured last stays in memory for the tasks that follow.

An evaluation is many short tasks over one model, whose loading may take longer than any of them.
"""

from collections.abc import Iterator
from functools import partial
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
    is_quantized,
    load_config,
    read_object,
    weight_files,
)
from pipelines.models.pretrained import load_pretrained
from pipelines.models.transformer import Transformer

if TYPE_CHECKING:
    from torchao.quantization import Int4Tensor


def use_onednn(model: nn.Module) -> None:
    """Let the linear layers of a model compute by oneDNN where they are fp32 on a CPU that has it.

    They have no gradients then.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for module in model.modules():
        if type(module) is nn.Linear and _is_plain(module.weight):
            module.forward = partial(_linear, module)  # type: ignore[method-assign]


def _is_plain(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    """[..., in] to [..., out]."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, module.weight, module.bias, "none", [], "")
    return made


# No file from anywhere else, no pickle and no code of a folder's own.
OFFLINE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
PLAIN: dict[str, Any] = {"use_safetensors": True, **OFFLINE}


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


Model = Transformer | TransformersModel


def load_model(folder: Path, device: torch.device) -> Model:
    """A model to measure: ours in fp32, or, of a folder in fewer bits, what a server computes.

    Raises:
        UserError: see `load_pretrained`.
    """
    values = read_object(folder / CONFIG)
    dtype = values.get("dtype") or values.get("torch_dtype")  # the older name
    if is_quantized(folder) or dtype in ("bfloat16", "float16"):
        return load_served(folder, device)
    model = load_pretrained(folder, device)
    use_onednn(model)
    return model


def load_served(folder: Path, device: torch.device) -> TransformersModel:
    """Load a folder by transformers, in its own type."""
    from transformers import AutoModelForCausalLM

    if is_quantized(folder):
        model = load_quantized(folder, device)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **PLAIN).to(device)
    return TransformersModel(model.eval(), load_config(folder))


def load_quantized(folder: Path, device: torch.device) -> nn.Module:
    """A quantised folder as a model of transformers, ready to compute.

    int8 computes as it is. int4 does where its kernels are; elsewhere its weights are decoded to
    bfloat16, the very numbers that the kernels multiply by.
    """
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **PLAIN)
    model = model.to(device).eval()
    if not has_int4_kernels():
        from torchao.quantization import Int4Tensor

        for _, linear in block_linears(model):
            if isinstance(linear.weight, Int4Tensor):
                linear.weight = nn.Parameter(decode_int4(linear.weight), requires_grad=False)
    return model


def decode_int4(weight: "Int4Tensor") -> Tensor:
    """The matrix [out, in] in bfloat16 that the codes stand for."""
    pairs = weight.qdata
    codes = torch.stack([(pairs << 4) >> 4, pairs >> 4], dim=-1).flatten(1)  # with their signs
    groups = codes.float().view(len(codes), -1, weight.block_size[1])
    scale, zero = (each.float().t().unsqueeze(-1) for each in (weight.scale, weight.zero_point))
    matrix: Tensor = (groups * scale + zero).flatten(1).to(torch.bfloat16)
    return matrix


def block_linears(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Those of the blocks: the head, which may be tied to the embeddings, is never quantised."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name, module


_Files = tuple[tuple[Path, int, int], ...]
_held: dict[_Files, Model] = {}  # one at most


def inference_device() -> torch.device:
    """The machine's accelerator, or its processor: the one place where that is chosen."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def held_model(folder: Path) -> Model:
    """`load_model` on this device, for inference; not loaded again while its files stand.

    Whoever gets it computes with it, and changes nothing of it.

    Raises:
        UserError: see `load_pretrained`.
    """
    files = _files(folder)
    if files not in _held:
        let_go()  # two of them may not fit
        _held[files] = load_model(folder, inference_device()).eval()
    return _held[files]


def let_go() -> None:
    """Free the memory for what needs it beside this module's users, in whichever process."""
    _held.clear()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _files(folder: Path) -> _Files:
    paths = [(folder / CONFIG).resolve(), *(path.resolve() for path in weight_files(folder))]
    states = [path.stat() for path in paths]
    return tuple(
        (path, state.st_size, state.st_mtime_ns) for path, state in zip(paths, states, strict=True)
    )
