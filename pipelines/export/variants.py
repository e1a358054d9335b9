"""The forms of a model that can be served: bf16, int8 and int4, written and measured."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from pipelines.core.errors import UserError
from pipelines.export.hf_folder import export_bf16
from pipelines.export.quantized import export_quantized
from pipelines.export.right_size import Variant
from pipelines.models.model_folder import weight_files
from pipelines.models.safetensors_files import weight_bytes
from pipelines.models.served import OFFLINE, inference_device, let_go, load_served
from pipelines.run.progress import ProgressMeter

Form = Literal["bf16", "int8", "int4"]
FORMS: tuple[Form, ...] = ("bf16", "int8", "int4")


@dataclass(frozen=True)
class Made:
    """A form that was written, or the reason why it cannot be written."""

    form: Form
    weight_bytes: int = 0
    load_seconds: float = 0.0
    problem: str | None = None


def write_variant(
    source: Path, folder: Path, form: Form, group: int, meter: ProgressMeter | None = None
) -> None:
    """Write one form of a model's folder; see `export_bf16` and `export_quantized`."""
    if form == "bf16":
        export_bf16(source, folder, meter)
    else:
        export_quantized(source, folder, 8 if form == "int8" else 4, group, meter)


def make_variant(source: Path, scratch: Path, form: Form, group: int) -> Made:
    """Write one form into a new folder of `scratch` named after it, and load it once."""
    folder = scratch / form
    folder.mkdir()
    try:
        write_variant(source, folder, form, group)
    except UserError as error:
        return Made(form, problem=f"{form}: {error}")
    let_go()
    _import_architecture(folder)
    began = time.perf_counter()
    load_served(folder, inference_device())
    seconds = time.perf_counter() - began
    return Made(form, weight_bytes(weight_files(folder)), seconds)


def _import_architecture(folder: Path) -> None:
    """Import the model's classes first, so that the load time does not include imports."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, **OFFLINE))


def measure_variants(
    source: Path,
    scratch: Path,
    score: Callable[[Path], float],
    group: int,
    unfit: Callable[[str], None],
) -> list[Variant]:
    """Write every possible form of this model, and measure each from its files.

    Args:
        source: A registered folder.
        scratch: An existing folder; each form becomes a folder in it, named after the form.
        score: A function that returns a folder's bits per byte.
        group: The number of weights that share a scale in int4.
        unfit: A function that receives the reason why a form cannot be made.
    """
    variants = []
    for form in FORMS:
        made = make_variant(source, scratch, form, group)
        if made.problem:
            unfit(made.problem)
        else:
            bits = score(scratch / form)
            variants.append(Variant(form, made.weight_bytes, bits, made.load_seconds))
    return variants
