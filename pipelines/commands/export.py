"""`penstock models export`: write a registered version in another format."""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pipelines.commands.export_output import Exported, describe, table
from pipelines.commands.models import Model, check_mlflow_answers
from pipelines.commands.options import Json
from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.core.storage import folder_bytes, write_json
from pipelines.export.formats import GGUF, PROGRAM, TRITON, Format
from pipelines.run.progress import meter_on_stderr

_MADE_BY = "penstock-export.json"  # beside what a package of a team's own wrote


@dataclass(frozen=True)
class _Request:
    """A version and its folder, and the options of the command."""

    model: str  # name@version
    source: Path
    to: Path
    group_size: int
    workspace: Path | None


To = Annotated[
    Path, typer.Option(help="A folder that does not exist yet, or Triton's model repository.")
]
Form = Annotated[
    str | None,
    typer.Option(
        "--format",
        help=f"{', '.join(Format)}, or one of a package of your own; huggingface, the default, "
        "writes the whole model with the adapter merged.",
    ),
]
BudgetGb = Annotated[
    float | None,
    typer.Option(help="Instead of a format: GB to serve the best of bf16, int8, int4."),
]
MaxLoss = Annotated[
    float, typer.Option(min=0, help="With a budget: the allowed loss in bits per byte.")
]
Sequences = Annotated[
    int, typer.Option(min=1, help="With a budget: full-context sequences served at once.")
]
GroupSize = Annotated[
    int, typer.Option(help="int4, vllm-int4: how many weights share a scale: 32, 64, 128 or 256.")
]
ServedFrom = Annotated[
    Path | None,
    typer.Option(help="triton-vllm: the repository's path on the server, if it differs."),
]
Workspace = Annotated[
    Path | None,
    typer.Option(help="Folder of the held-out documents, if not the model's own run."),
]


def export(
    model: Model,
    to: To,
    form: Form = None,
    budget_gb: BudgetGb = None,
    max_loss: MaxLoss = 0.02,
    sequences: Sequences = 8,
    group_size: GroupSize = 128,
    served_from: ServedFrom = None,
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Write a registered model in another format.

    A format that rounds the weights is scored after it is written.
    """
    if form is not None and budget_gb is not None:
        raise UserError("give --format or --budget-gb, not both: a budget chooses a format")
    chosen = _find_format(form or Format.HUGGINGFACE)
    check_mlflow_answers()
    from pipelines.registry import registry

    version = registry.named(model)
    source = registry.verified_folder(version)
    request = _Request(version.label, source, to, group_size, workspace)
    if budget_gb is not None:
        chosen, made = _write_fitting(request, budget_gb, max_loss, sequences)
    elif kind := TRITON.get(chosen):
        from pipelines.export.triton_server import export_triton

        to = export_triton(source, to, version.name, version.version, kind, served_from)
        made = {}
    else:
        made = _write(request, chosen)
    result = Exported(
        model=version.label,
        format=chosen,
        folder=str(to.absolute()),
        bytes=folder_bytes(to),
        registered_bytes=sum(path.stat().st_size for path in source.glob("*.safetensors")),
        **made,
    )
    typer.echo(json.dumps(asdict(result), indent=2) if as_json else describe(result))


def _find_format(name: str) -> str:
    """Return a format of Penstock or the name of an extension; refuse any other."""
    from pipelines.core import extensions

    known = [*Format, *extensions.names("exports")]
    if name not in known:
        raise UserError(f"--format {name}: the formats are {', '.join(known)}")
    return name


def _write(request: _Request, form: str) -> dict[str, Any]:
    """Write one format; return the measurements by the field names of `Exported`."""
    from pipelines.export import hf_folder
    from pipelines.export.source import new_folder

    with new_folder(request.to) as folder:
        match form:
            case Format.HUGGINGFACE:
                hf_folder.export_whole(request.source, folder)
            case Format.BF16:
                hf_folder.export_bf16(request.source, folder, meter_on_stderr(form))
            case Format.PEFT:
                hf_folder.export_adapter(request.source, folder)
            case Format.INT8 | Format.INT4 | Format.VLLM_INT4:
                return _write_quantized(request, folder, form)
            case Format.ONNX | Format.TORCH_EXPORT:
                from pipelines.export.program import export_program

                difference = export_program(request.source, folder, PROGRAM[form])
                return {"logit_difference": difference}
            case Format.GGUF | Format.GGUF_F16 | Format.GGUF_Q8_0:
                return _write_gguf(request, folder, form)
            case own:
                return _write_own(request, folder, own)
    return {}


def _write_own(request: _Request, folder: Path, name: str) -> dict[str, str]:
    """Write the format of a package of a team's own, and beside it which code made it."""
    from pipelines.core import extensions

    made_by = {
        "package": extensions.package("exports", name),
        "fingerprint": extensions.fingerprint("exports", name),
    }
    extensions.load("exports", name)(request.source, folder)
    write_json(folder / _MADE_BY, {"model": request.model, "format": name, **made_by})
    return made_by


def _write_quantized(request: _Request, folder: Path, form: str) -> dict[str, Any]:
    from pipelines.export.variants import write_variant
    from pipelines.stages.held_out import read_held_out, score_export

    held_out = read_held_out(request.source, load_settings().runs, request.workspace)
    if form == Format.VLLM_INT4:
        from pipelines.export.compressed import export_compressed

        export_compressed(request.source, folder, request.group_size, meter_on_stderr(form))
    else:
        bits: Literal["int8", "int4"] = "int8" if form == Format.INT8 else "int4"
        write_variant(request.source, folder, bits, request.group_size, meter_on_stderr(form))
    return {
        "bits_per_byte": score_export(folder, held_out, meter_on_stderr(form)),
        "registered_bits_per_byte": held_out.bits_per_byte,
    }


def _write_gguf(request: _Request, folder: Path, form: str) -> dict[str, Any]:
    """Write a file for llama.cpp; in 8 bits, a copy with the same numbers is scored."""
    from pipelines.export.gguf_file import export_gguf, write_rounded
    from pipelines.models.model_folder import load_config
    from pipelines.stages.held_out import read_held_out, score_export

    held_out = None
    if form == Format.GGUF_Q8_0:
        held_out = read_held_out(request.source, load_settings().runs, request.workspace)
    context = export_gguf(request.source, folder, GGUF[form], request.model)
    whole = load_config(request.source).context_length
    if context < whole:
        typer.echo(
            f"the file's context is the sliding window, {context} tokens of {whole}: llama.cpp "
            "would see beyond the window",
            err=True,
        )
    if held_out is None:
        return {"context_length": context}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        write_rounded(request.source, Path(scratch), GGUF[form])
        bits = score_export(Path(scratch), held_out, meter_on_stderr(form))
    return {
        "context_length": context,
        "bits_per_byte": bits,
        "registered_bits_per_byte": held_out.bits_per_byte,
    }


def _write_fitting(
    request: _Request, budget_gb: float, max_loss: float, sequences: int
) -> tuple[Format, dict[str, Any]]:
    """Write the best variant within a budget; return its format and all measurements."""
    from pipelines.export.right_size import Budget, assess_variants, choose
    from pipelines.export.source import new_folder
    from pipelines.export.variants import measure_variants
    from pipelines.models.model_folder import load_config
    from pipelines.stages.held_out import read_held_out, score_export

    config = load_config(request.source)
    budget = Budget(budget_gb, max_loss, sequences, config.context_length)
    held_out = read_held_out(request.source, load_settings().runs, request.workspace)
    with new_folder(request.to) as folder, tempfile.TemporaryDirectory(dir=folder) as scratch:
        variants = measure_variants(
            request.source,
            Path(scratch),
            lambda variant: score_export(variant, held_out, meter_on_stderr(variant.name)),
            request.group_size,
            lambda why: typer.echo(f"left out: {why}", err=True),
        )
        judged = assess_variants(variants, config, held_out.bits_per_byte, budget)
        chosen = choose(judged, budget).variant
        for path in (Path(scratch) / chosen.name).iterdir():
            path.rename(folder / path.name)
    typer.echo(table(judged, budget), err=True)
    return Format(chosen.name), {
        "bits_per_byte": chosen.bits_per_byte,
        "registered_bits_per_byte": held_out.bits_per_byte,
        "variants": tuple(asdict(each) for each in judged),
    }
