"""Reading and writing a decoder as a Hugging Face folder: safetensors and JSON, never a pickle.

This needs no `transformers`, whose `AutoModelForCausalLM` loads what `save_pretrained` writes.
On a device only one tensor at a time is whole, however many processes share the model; a process
that writes has at most two files' tensors on the host.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipelines.core.errors import UserError
from pipelines.core.storage import write_json
from pipelines.models.config import DecoderConfig
from pipelines.models.config_json import write_config
from pipelines.models.family_weights import NO_WEIGHT, Shapes, Stored, base_prefix, stored_tensors
from pipelines.models.gather import Gather
from pipelines.models.lora import LoRALinear, adapted_layers
from pipelines.models.model_folder import CONFIG, INDEX, WEIGHTS, load_config, weight_files
from pipelines.models.safetensors_files import Rows, SafetensorsFiles
from pipelines.models.transformer import Transformer
from pipelines.models.weights import (
    Place,
    canonical_name,
    fill,
    is_sharded,
    part_here,
    writes,
)

FILE_BYTES = 5 * 10**9  # largest size of one file, unless a single tensor is larger
_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_pretrained(folder: Path, device: torch.device | None = None) -> Transformer:
    """Read a folder of any supported family into fp32 weights.

    Args:
        folder: A folder in Hugging Face's format, written by Penstock or not.
        device: Where each tensor is read to, directly from its file; the CPU by default.

    Raises:
        UserError: see `load_weights`; or the model is not supported.
    """
    config = load_config(folder)
    _check(folder, config, SafetensorsFiles(weight_files(folder)))  # before memory is taken
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device=device or torch.device("cpu"))
    load_weights(model, folder)
    return model


def load_weights(model: Transformer, folder: Path) -> None:
    """Read a folder's weights into a model or a part of one, on any device, in any type.

    The model may come from `to_empty`. If it is sharded, each process keeps only its shard.

    Raises:
        UserError: there are no safetensors; a file or tensor is missing, surplus or broken; or a
            tensor's shape differs from the model's.
    """
    model.after_to_empty()
    places = named_places(model)
    for name, tensor in read_weights(folder, model.config, places):
        if tensor is not places[name]:
            fill(places[name], tensor)


def read_weights(
    folder: Path, config: DecoderConfig, places: Mapping[str, Place]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a folder's parameters with their canonical names, one after the other.

    Args:
        folder: A folder in Hugging Face's format.
        config: The config of the whole model.
        places: The wanted parameters, on one device. A tensor with the type and layout of its file
            is read directly into its place, which is yielded. Of one that is sharded, this
            process's rows are read and no others, whole even where it holds a part of each; its
            place is yielded, too. So it is for a parameter of several experts, once for each of
            them, and other processes' experts are not read. Others are yielded whole: tensors that
            are split into several parameters, and those that become NF4.

    Raises:
        UserError: see `load_weights`.
    """
    files = SafetensorsFiles(weight_files(folder))
    found = _check(folder, config, files)
    wanted = {name: each for name, each in found.items() if each.parameters[0] in places}
    into: dict[str, Tensor] = {}
    rows: dict[str, Rows] = {}
    held: dict[str, _Part] = {}
    for name, each in list(wanted.items()):
        place = _weight(places[each.parameters[0]])
        if each.expert is not None:
            if (here := _expert_here(place, each.expert)) is None:
                del wanted[name]
                continue
            held[name] = here
            if here.place.shape == each.shape:
                into[name] = here.place
        elif isinstance(place, Tensor) and each.split is None:
            if not is_sharded(place):
                into[name] = place
            elif (mine := part_here(place)) is not None:
                rows[name], part = mine
                held[name] = _Part(place.to_local(), (slice(None), *part))
                if held[name].place.shape[1:] == place.shape[1:]:
                    into[name] = held[name].place
    device = next(iter(places.values())).device
    for name, tensor in files.read(device, wanted, into, rows):
        stored = wanted[name]
        if name in held:
            if tensor is not into.get(name):  # of another type, or with other processes' parts
                held[name].place.copy_(tensor[*held[name].part])
            yield stored.parameters[0], places[stored.parameters[0]]  # type: ignore[misc]
        else:
            parts = [tensor] if stored.split is None else stored.split(tensor)
            yield from zip(stored.parameters, parts, strict=True)


class _Part(NamedTuple):
    """Where a process holds a tensor of a file, and which part of what it reads of it."""

    place: Tensor
    part: tuple[slice, ...]


def _expert_here(place: Place, expert: int) -> _Part | None:
    """Return where one expert's weight belongs here; None if other processes hold it."""
    if not is_sharded(place):
        return _Part(place[expert], ())  # type: ignore[index]
    here = part_here(place)
    if here is None:
        raise NotImplementedError("experts that are no block of consecutive rows")
    rows, part = here
    if not rows.first <= expert < rows.stop:
        return None
    return _Part(place.to_local()[expert - rows.first], part)


def _weight(place: Place) -> Place:
    """Return the frozen weight where a place is a layer with an adapter, unless that is NF4."""
    if isinstance(place, LoRALinear) and isinstance(place.frozen, Tensor):
        return place.frozen.detach()
    return place


def named_places(model: Transformer) -> dict[str, Place]:
    """Return the parameters by canonical name; tied ones once, under the embeddings' name.

    The weight of an adapted layer stands for its frozen weight and adapter together.
    """
    adapted = adapted_layers(model)
    places: dict[str, Place] = {
        name: each.detach()
        for wrapped, each in model.named_parameters()
        if not (name := canonical_name(wrapped)).startswith(tuple(f"{a}." for a in adapted))
        or name.endswith(".bias")
    }
    places |= model.balance_biases
    places |= {f"{name}.weight": layer for name, layer in adapted.items()}
    if model.tied_copy is not None:  # the last stage of a pipeline
        places[_EMBEDDINGS] = places.pop(_HEAD)
    return places


def save_pretrained(
    model: Transformer | Sequence[Transformer],
    folder: Path,
    end_of_text: int | None = None,
    end_of_answer: int | None = None,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads.

    If the model is sharded or split into stages, all processes call this together: tensors are
    gathered one at a time, and the processes take turns with the files, so that they write at the
    same time, to a folder that they share.

    Args:
        model: The model or this process's stages of it, on any device; the type is kept.
        folder: Created if missing.
        end_of_text: The token id that ends a document, and thus a generation.
        end_of_answer: The token id that ends an answer of a conversation, and thus a generation.
    """
    parts = [model] if isinstance(model, Transformer) else model
    places = {name: each for part in parts for name, each in named_places(part).items()}
    config, dtype = parts[0].config, next(iter(places.values())).dtype
    shapes = _whole_shapes(config)
    groups = _grouped(stored_tensors(config, shapes), dtype.itemsize)
    gather = Gather(shapes, places)
    folder.mkdir(parents=True, exist_ok=True)
    values = write_config(config, str(dtype).removeprefix("torch."))
    if writes():
        # Also where there is none: else transformers takes the ids of the family's first model.
        special: dict[str, Any] = dict.fromkeys(_SPECIAL_TOKENS, end_of_text)
        write_json(folder / CONFIG, values | special)
        if end_of_answer not in (None, end_of_text):
            special["eos_token_id"] = [end_of_answer, end_of_text]
        write_json(folder / "generation_config.json", special)
    names = [WEIGHTS]
    if len(groups) > 1:
        names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
        _write_index(folder, dict(zip(names, groups, strict=True)), dtype.itemsize)
    with ThreadPoolExecutor(1, "export") as thread:
        written: Future[None] | None = None
        for number, (name, group) in enumerate(zip(names, groups, strict=True)):
            tensors = _gathered(group, gather, number % gather.world)
            if tensors:  # this process writes them, while all gather the next file's
                if written is not None:
                    written.result()  # no more than two files are in its memory
                written = thread.submit(_write, folder / name, tensors)
        if written is not None:
            written.result()
    if gather.world > 1:
        dist.barrier()  # the folder is complete for every process


def _check(folder: Path, config: DecoderConfig, files: SafetensorsFiles) -> dict[str, Stored]:
    """Return the expected tensors by their names in the files; refuse other files."""
    base = base_prefix(config)
    found = {}
    for stored in stored_tensors(config, _whole_shapes(config)):
        name = stored.name if stored.name in files.places else stored.name.removeprefix(base)
        place = files.places.get(name)
        if place is None:
            raise UserError(f"{folder}: the tensor {stored.name} is missing from the weights")
        if place.shape != stored.shape:
            raise UserError(
                f"{folder}: {name} has shape {place.shape}, config.json says {stored.shape}"
            )
        found[name] = stored
    # DeepSeek's layer after the last guesses a further token; transformers leaves it out, too.
    surplus = (f"{base}layers.{config.layers}.",) * config.sigmoid_router
    surplus += (_HEAD,) * config.tie_embeddings
    for name in files.places.keys() - found.keys():
        if not (NO_WEIGHT.search(name) or name.startswith(surplus)):
            raise UserError(f"{folder}: the tensor {name} is not one of this model")
    return found


@cache
def _whole_shapes(config: DecoderConfig) -> Shapes:
    """Return the shapes of all parameters of a whole model."""
    with torch.device("meta"):
        places = named_places(Transformer(config))
    return {name: tuple(each.shape) for name, each in places.items()}


def _grouped(tensors: Iterable[Stored], itemsize: int) -> list[list[Stored]]:
    """Return groups of consecutive tensors, each as large as one file may be."""
    groups: list[list[Stored]] = [[]]
    size = 0
    for each in tensors:
        length = math.prod(each.shape) * itemsize
        if groups[-1] and size + length > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(each)
        size += length
    return groups


def _write_index(folder: Path, files: Mapping[str, list[Stored]], itemsize: int) -> None:
    if writes():
        weight_map = {each.name: name for name, group in files.items() for each in group}
        size = sum(math.prod(each.shape) for group in files.values() for each in group) * itemsize
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _gathered(group: list[Stored], gather: Gather, writer: int) -> dict[str, Tensor]:
    """Return a file's tensors on the process that writes it, and none on the others."""
    tensors = {}
    gathered: tuple[str, ...] = ()
    parts: list[Tensor] = []
    for stored in group:
        if stored.parameters != gathered:  # a parameter of several experts is gathered once
            parts = [gather(name, writer) for name in stored.parameters]
            gathered = stored.parameters
        if gather.rank == writer:
            tensor = parts[0] if stored.join is None else stored.join(parts)
            tensor = tensor if stored.expert is None else tensor[stored.expert]
            tensors[stored.name] = tensor.cpu().contiguous()
    return tensors


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
