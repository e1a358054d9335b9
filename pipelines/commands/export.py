"""`penstock models export`: write a registered version in another format."""

import json
import shlex
import tempfile
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pipelines.commands.models import Model, check_mlflow_answers
from pipelines.commands.options import Json
from pipelines.core.errors import UserError
from pipelines.core.formatting import size
from pipelines.core.settings import load_settings
from pipelines.core.storage import folder_bytes, write_json
from pipelines.run.progress import ProgressMeter

if TYPE_CHECKING:
    from pipelines.export.gguf_file import Weights
    from pipelines.export.program import Kind
    from pipelines.export.right_size import AssessedVariant, Budget
    from pipelines.export.triton_server import Kind as TritonKind


class Format(StrEnum):
    """The values of the option `--format`."""

    HUGGINGFACE = "huggingface"
    BF16 = "bf16"
    PEFT = "peft"
    INT8 = "int8"
    INT4 = "int4"
    VLLM_INT4 = "vllm-int4"
    TRITON = "triton"
    TRITON_STREAM = "triton-stream"
    TRITON_VLLM = "triton-vllm"
    ONNX = "onnx"
    TORCH_EXPORT = "torch-export"
    GGUF = "gguf"
    GGUF_F16 = "gguf-f16"
    GGUF_Q8_0 = "gguf-q8_0"


_TRITON: dict[str, "TritonKind"] = {
    Format.TRITON: "python",
    Format.TRITON_STREAM: "python-stream",
    Format.TRITON_VLLM: "vllm",
}
_PROGRAM: dict[str, "Kind"] = {Format.ONNX: "onnx", Format.TORCH_EXPORT: "torch-export"}
_GGUF: dict[str, "Weights"] = {
    Format.GGUF: "own",
    Format.GGUF_F16: "f16",
    Format.GGUF_Q8_0: "q8_0",
}
_MADE_BY = "penstock-export.json"  # beside what a package of a team's own wrote
_VLLM_LOADS = (Format.HUGGINGFACE, Format.BF16, Format.INT8, Format.INT4, Format.VLLM_INT4)


@dataclass(frozen=True)
class Exported:
    """The command's report of an export; sizes in bytes."""

    model: str  # name@version
    format: str
    folder: str
    bytes: int
    registered_bytes: int
    bits_per_byte: float | None = None  # of the written model, if its weights were rounded
    registered_bits_per_byte: float | None = None
    logit_difference: float | None = None  # the graph's largest difference from the model
    context_length: int | None = None  # of a GGUF file, in tokens
    package: str | None = None  # name and version, if a package of a team's own wrote the format
    fingerprint: str | None = None  # of that package's code and the packages it requires
    variants: tuple[dict[str, Any], ...] = ()  # measured for a memory budget


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
    elif kind := _TRITON.get(chosen):
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
    typer.echo(json.dumps(asdict(result), indent=2) if as_json else _describe(result))


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
                hf_folder.export_bf16(request.source, folder, _progress(form))
            case Format.PEFT:
                hf_folder.export_adapter(request.source, folder)
            case Format.INT8 | Format.INT4 | Format.VLLM_INT4:
                return _write_quantized(request, folder, form)
            case Format.ONNX | Format.TORCH_EXPORT:
                from pipelines.export.program import export_program

                difference = export_program(request.source, folder, _PROGRAM[form])
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

        export_compressed(request.source, folder, request.group_size, _progress(form))
    else:
        bits: Literal["int8", "int4"] = "int8" if form == Format.INT8 else "int4"
        write_variant(request.source, folder, bits, request.group_size, _progress(form))
    return {
        "bits_per_byte": score_export(folder, held_out, _progress(form)),
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
    context = export_gguf(request.source, folder, _GGUF[form], request.model)
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
        write_rounded(request.source, Path(scratch), _GGUF[form])
        bits = score_export(Path(scratch), held_out, _progress(form))
    return {
        "context_length": context,
        "bits_per_byte": bits,
        "registered_bits_per_byte": held_out.bits_per_byte,
    }


def _progress(form: str) -> ProgressMeter:
    """Return a meter that prints a line with the remaining time to stderr every few seconds."""
    return ProgressMeter(form, lambda each: typer.echo(each.line(), err=True), interval=5)


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
            lambda variant: score_export(variant, held_out, _progress(variant.name)),
            request.group_size,
            lambda why: typer.echo(f"left out: {why}", err=True),
        )
        judged = assess_variants(variants, config, held_out.bits_per_byte, budget)
        chosen = choose(judged, budget).variant
        for path in (Path(scratch) / chosen.name).iterdir():
            path.rename(folder / path.name)
    typer.echo(_table(judged, budget), err=True)
    return Format(chosen.name), {
        "bits_per_byte": chosen.bits_per_byte,
        "registered_bits_per_byte": held_out.bits_per_byte,
        "variants": tuple(asdict(each) for each in judged),
    }


def _table(judged: "list[AssessedVariant]", budget: "Budget") -> str:
    rows = [
        f"of {budget.gb:g} GB, {budget.sequences} x {budget.tokens:,} tokens at once:",
        f"  {'':6}{'bits per byte':>14}{'loss':>9}{'weights':>10}{'in all':>10}{'loaded in':>11}",
    ]
    for each in judged:
        verdict = "" if each.fits and each.good else "  too large" if each.good else "  too lossy"
        rows.append(
            f"  {each.variant.name:6}{each.variant.bits_per_byte:14.4f}{each.lost:+9.4f}"
            f"{size(each.memory.weights):>10}{size(each.memory.total):>10}"
            f"{each.variant.load_seconds:9.1f} s{verdict}"
        )
    return "\n".join(rows)


def _describe(result: Exported) -> str:
    sizes = f"{size(result.bytes)} (registered weights {size(result.registered_bytes)})"
    lines = [f"{result.model} as {result.format} in {result.folder}", f"  size   {sizes}"]
    if result.bits_per_byte is not None and result.registered_bits_per_byte is not None:
        lost = result.bits_per_byte - result.registered_bits_per_byte
        lines.append(
            f"  score  {result.bits_per_byte:.4f} bits per byte, {lost:+.4f} against the "
            f"registered {result.registered_bits_per_byte:.4f}, on the same held-out documents"
        )
    if result.logit_difference is not None:
        lines.append(f"  check  run from the file, logits within {result.logit_difference:.1e}")
    if result.package is not None:
        lines.append(f"  code   {result.package}, fingerprint {result.fingerprint}")
    if result.format in _TRITON:
        repository = Path(result.folder).parent.parent
        lines.append(f"  serve  tritonserver --model-repository {shlex.quote(str(repository))}")
    if result.format in _GGUF:
        from pipelines.export.gguf_file import FILE

        path = shlex.quote(str(Path(result.folder) / FILE))
        lines.append(f"  serve  llama-server --model {path} --ctx-size {result.context_length}")
    if result.format in _VLLM_LOADS:
        lines.append(f"  serve  vllm serve {shlex.quote(result.folder)}")
    return "\n".join(lines)
