"""Whether the weights that a server will load are those that were trained.

A server reads the written folder with transformers or with code that agrees with it. So the folder
is read afresh by transformers here, without the objects that training held, and compared with the
loss that training measured, with the decoder that evaluates it, and with its adapter on its base.
"""

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from pipelines.loading.dataloader import IGNORED
from pipelines.models.check_batch import CheckBatch
from pipelines.models.model_folder import CONFIG, load_config, stated_type, weight_files
from pipelines.models.pretrained import load_pretrained
from pipelines.models.quantization import dequantize, quantize
from pipelines.models.safetensors_files import SafetensorsFiles
from pipelines.models.served import PLAIN, inference_device, let_go, use_onednn
from pipelines.models.weights import COMPUTE_DTYPES
from pipelines.run.verdict import ServedCheck, ServedCheckName

# How far two losses may lie apart, in nats a token, for the roundings of training's products. One
# of 1e-4 is the distance between two orders of fp32 sums in deep models; half precision rounds
# each product to 3 digits.
_LIMITS = {"fp32": 1e-4, "tf32": 2e-3, "bf16": 1e-2, "fp16": 1e-2, "fp8": 5e-2}
_MANY_TOKENS = 256  # of which this holds; of fewer, roundings average out less
_NF4_LIMIT = 5e-2  # blocks of 64 weights may lie otherwise in a base whose layers are joined
_EVALUATED_LIMIT = 5e-3  # of any one token
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adapter:
    """An adapter in peft's format, and the model that it was trained on.

    Attributes:
        folder: The adapter's folder.
        base: The folder of the base model.
        in_nf4: Whether training held the base in 4 bits.
    """

    folder: Path
    base: Path
    in_nf4: bool


def check_weights(
    folder: Path, batch: CheckBatch | None, adapter: Adapter | None
) -> tuple[ServedCheck, ...]:
    """Compare the weights in a folder with the trained ones.

    Args:
        folder: The trained model's folder, with the adapter merged.
        batch: The sequences that training measured; None of a run of an earlier version.
        adapter: The adapter that the folder should contain; None if there is none.
    """
    let_go()  # memory may not hold two models
    read: list[nn.Module] = []
    found = [
        tried("files", folder, partial(_files, folder, read)),
        tried("data type", folder, partial(_type, folder)),
    ]
    if batch is None or not all(each.holds for each in found):
        return tuple(found)
    found.append(_context(folder, batch))
    if not batch.targets:
        nothing = "not compared: the sequences that training kept have no answers to predict"
        return (*found, ServedCheck(name="trained weights", holds=True, found=nothing))
    losses: list[Tensor] = []
    found.append(tried("trained weights", folder, partial(_trained, read, batch, losses)))
    if not losses:
        return tuple(found)
    if stated_type(folder) == "float32":  # others are evaluated by transformers
        found.append(
            tried("evaluated weights", folder, partial(_evaluated, folder, batch, *losses))
        )
    if adapter is not None:
        found.append(tried("adapter", folder, partial(_adapter, adapter, batch, *losses)))
    return tuple(found)


def tried(name: ServedCheckName, folder: Path, check: Callable[[], ServedCheck]) -> ServedCheck:
    """Return the check's result; what a library refuses here, it refuses in a server."""
    try:
        found = check()
    except Exception as error:
        _log.info("%s", name, exc_info=True)
        line = str(error).strip().partition("\n")[0].replace(f"{folder}/", "")
        found = ServedCheck(name=name, holds=False, found=f"{type(error).__name__}: {line}")
    return found


def _files(folder: Path, read: list[nn.Module]) -> ServedCheck:
    """Every tensor that transformers wants is there, and no other; the model is added to `read`."""
    from transformers import AutoModelForCausalLM

    files = weight_files(folder)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True, **PLAIN
    )
    wrong = [
        f"{kind.removesuffix('_keys')} {min(map(str, info[kind]))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info[kind]
    ]
    load_config(folder)
    read.append(_ready(model))
    tensors = len(SafetensorsFiles(files).places)
    good = f"transformers finds all it wants in {tensors} tensors of {len(files)} files"
    return ServedCheck(name="files", holds=not wrong, found="; ".join(wrong) or good)


def _ready(model: nn.Module) -> nn.Module:
    """Return a model where it computes, as evaluation has it."""
    model = model.to(inference_device()).eval()
    use_onednn(model)
    return model


def _type(folder: Path) -> ServedCheck:
    """The weights have the type that config.json says."""
    places = SafetensorsFiles(weight_files(folder)).places.values()
    stored = {str(each.dtype).removeprefix("torch.") for each in places}
    said = stated_type(folder)
    found = f"{', '.join(sorted(stored))} in the files, {said} in {CONFIG}"
    return ServedCheck(name="data type", holds=stored == {said}, found=found)


def _context(folder: Path, batch: CheckBatch) -> ServedCheck:
    """A server accepts sequences as long as those that were trained on."""
    served, trained = load_config(folder).context_length, batch.length
    found = f"{served} tokens in {CONFIG}, trained on sequences of {trained}"
    return ServedCheck(name="context", holds=served >= trained, found=found)


@torch.inference_mode()
def _losses(model: Any, batch: CheckBatch) -> Tensor:
    """Return the nats of each target, [targets], from one sequence after the other."""
    device = next(model.parameters()).device
    nats = []
    for inputs_S, targets_S in zip(batch.inputs_BS, batch.targets_BS, strict=True):  # noqa: N806
        found = model(inputs_S[None].to(device))
        logits_SV = getattr(found, "logits", found)[0].float()  # noqa: N806
        chosen = targets_S.to(device) != IGNORED
        nats.append(
            F.cross_entropy(logits_SV[chosen], targets_S.to(device)[chosen], reduction="none").cpu()
        )
    return torch.cat(nats).double()


def _trained(read: list[nn.Module], batch: CheckBatch, measured: list[Tensor]) -> ServedCheck:
    """The folder has the loss that the trained model had before it was written.

    The model is taken from `read`, as memory may not hold the next one, too; its losses are added
    to `measured`.
    """
    losses_T = _losses(read.pop(), batch)  # noqa: N806
    measured.append(losses_T)
    trained, served = batch.nats / batch.targets, losses_T.mean().item()
    limit = _limit(batch)
    found = (
        f"{trained:.5f} nats a token at the end of training, {served:.5f} as transformers reads "
        f"the folder ({batch.targets} tokens, at most {limit:.1g} apart)"
    )
    return ServedCheck(name="trained weights", holds=abs(trained - served) <= limit, found=found)


def _limit(batch: CheckBatch) -> float:
    """Return how far two mean losses may lie apart, in nats a token."""
    return _LIMITS[batch.precision] * max(1.0, math.sqrt(_MANY_TOKENS / batch.targets))


def _evaluated(folder: Path, batch: CheckBatch, losses_T: Tensor) -> ServedCheck:  # noqa: N803
    """The decoder that evaluates a folder computes what transformers computes."""
    ours_T = _losses(load_pretrained(folder, inference_device()).eval(), batch)  # noqa: N806
    most = (ours_T - losses_T).abs().max().item()
    found = (
        f"no token's nats differ by more than {most:.1e} between evaluation and transformers "
        f"(at most {_EVALUATED_LIMIT:g})"
    )
    return ServedCheck(name="evaluated weights", holds=most <= _EVALUATED_LIMIT, found=found)


def _adapter(adapter: Adapter, batch: CheckBatch, losses_T: Tensor) -> ServedCheck:  # noqa: N803
    """The folder is the base with the adapter, as peft puts them together, and not the base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    # Training rounded the frozen base to this type.
    dtype = COMPUTE_DTYPES.get(batch.precision, torch.float32)
    base: Any = AutoModelForCausalLM.from_pretrained(adapter.base, dtype=dtype, **PLAIN)
    with warnings.catch_warnings():  # peft goes on without them
        warnings.filterwarnings("error", message="Found missing adapter keys")
        together: Any = PeftModel.from_pretrained(base, adapter.folder, local_files_only=True)
    if adapter.in_nf4:
        _round_to_nf4(together)
    together = _ready(together)
    adapted_T = _losses(together, batch)  # noqa: N806
    with together.disable_adapter():
        alone_T = _losses(together, batch)  # noqa: N806
    adapted, merged, alone = (each.mean().item() for each in (adapted_T, losses_T, alone_T))
    limit = _NF4_LIMIT if adapter.in_nf4 else _limit(batch)
    found = (
        f"{adapted:.5f} nats a token with the adapter on its base, {merged:.5f} merged, "
        f"{alone:.5f} without it (the first two at most {limit:g} apart)"
    )
    # An adapter that has learnt little is within the limit; it is still nearer than its base.
    same = abs(adapted - merged) <= limit
    nearer = (adapted_T - losses_T).abs().sum() < (alone_T - losses_T).abs().sum()
    return ServedCheck(name="adapter", holds=same and bool(nearer), found=found)


def _round_to_nf4(together: Any) -> None:
    """Round the base's adapted layers as training did."""
    for module in together.modules():
        if hasattr(module, "lora_A") and isinstance(module.base_layer, nn.Linear):
            weight = module.base_layer.weight
            weight.data = dequantize(quantize(weight.data), weight.shape, weight.dtype)
