"""Exports for Hugging Face's libraries: the whole model, a bfloat16 copy, or only its adapter."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core.errors import UserError
from pipelines.core.storage import read_json, write_json
from pipelines.export.source import check, companion_files
from pipelines.models import peft_format
from pipelines.models.model_folder import read_object
from pipelines.models.safetensors_files import SafetensorsFiles
from pipelines.registry.registry import LINEAGE
from pipelines.run.progress import ProgressMeter

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER = "adapter"  # the adapter's folder in a registered folder, if training used one


def export_whole(source: Path, folder: Path) -> None:
    """Copy a model with its adapter merged; `AutoModelForCausalLM.from_pretrained` can load it.

    Args:
        source: A registered folder.
        folder: An existing folder that receives the files.

    Raises:
        UserError: See `source.check`.
    """
    for path in [*check(source), *companion_files(source)]:
        shutil.copyfile(path, folder / path.name)


def export_bf16(source: Path, folder: Path, meter: ProgressMeter | None = None) -> None:
    """Copy a model in bfloat16, half the bytes of fp32, with one tensor at a time in memory.

    Args:
        source: A registered folder.
        folder: An existing folder that receives the files.
        meter: Told the bytes that are read.

    Raises:
        UserError: See `source.check_whole`.
    """
    from pipelines.export.tensor_by_tensor import rewrite, to_bfloat16  # they import torch

    def change(name: str, tensor: "Tensor") -> "dict[str, Tensor]":
        # transformers keeps what is added to experts' scores in fp32, too.
        return {name: tensor if name.endswith("correction_bias") else to_bfloat16(tensor)}

    rewrite(source, folder, change, {"dtype": "bfloat16"}, meter=meter)


def export_adapter(source: Path, folder: Path) -> None:
    """Copy only the adapter, in peft's format, with the name of the base model it was trained on.

    Args:
        source: A registered folder.
        folder: An existing folder that receives the files.

    Raises:
        UserError: The model was trained without an adapter, or its files are broken.
    """
    adapter = source / ADAPTER
    if not adapter.is_dir():
        raise UserError(
            f"{source}: the model was trained without an adapter; use --format huggingface to "
            "export the whole model"
        )
    weights = adapter / peft_format.WEIGHTS
    if not weights.is_file():
        raise UserError(f"{adapter}: {weights.name} is missing; the version is broken")
    SafetensorsFiles([weights])
    shutil.copyfile(weights, folder / weights.name)
    config = read_object(adapter / peft_format.CONFIG)
    write_json(
        folder / peft_format.CONFIG, config | {"base_model_name_or_path": base_model(source)}
    )


def base_model(source: Path) -> str | None:
    """Return the base model by the recipe in the lineage; None if it is unknown."""
    recipe = _lineage(source).get("recipe") or {}
    base: str | None = (recipe.get("model") or {}).get("init_from")
    return base


def _lineage(source: Path) -> dict[str, Any]:
    path = source / LINEAGE
    found: dict[str, Any] = read_json(path) if path.is_file() else {}
    return found
