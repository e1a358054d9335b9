"""The forms of a model that compete to be served: bf16, int8 and int4, written and measured."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from pipelines.core.errors import UserError
from pipelines.export.huggingface import export_bf16
from pipelines.export.quantized import export_quantized
from pipelines.export.right_size import Variant
from pipelines.export.transformers_model import load
from pipelines.models.folder import weight_files
from pipelines.models.safetensors_files import weight_bytes

Form = Literal["bf16", "int8", "int4"]
FORMS: tuple[Form, ...] = ("bf16", "int8", "int4")


def write_variant(source: Path, folder: Path, form: Form, group: int) -> None:
    """Write one form of a registered folder; see `export_bf16` and `export_quantized`."""
    if form == "bf16":
        export_bf16(source, folder)
    else:
        export_quantized(source, folder, 8 if form == "int8" else 4, group)


def measure_variants(
    source: Path,
    scratch: Path,
    score: Callable[[Path], float],
    group: int,
    unfit: Callable[[str], None],
) -> list[Variant]:
    """Write every form that this model has, and measure each from its files.

    Args:
        source: A registered folder.
        scratch: Is there; each form becomes a folder in it, under its name.
        score: Bits per byte of a folder.
        group: Weights that share a scale in int4.
        unfit: Is told why a form can't be made.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    made = []
    for form in FORMS:
        folder = scratch / form
        folder.mkdir()
        try:
            write_variant(source, folder, form, group)
        except UserError as error:
            unfit(f"{form}: {error}")
            continue
        began = time.perf_counter()
        load(folder, accelerator or torch.device("cpu"))
        seconds = time.perf_counter() - began
        made.append(Variant(form, weight_bytes(weight_files(folder)), score(folder), seconds))
    return made
