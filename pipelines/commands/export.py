"""`penstock models export`: a registered version in the form that a server or a library wants."""

import json
import shlex
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.figures import file_size
from pipelines.commands.models import Model, check_mlflow_answers
from pipelines.commands.options import Json
from pipelines.core.settings import load_settings
from pipelines.core.storage import folder_bytes

if TYPE_CHECKING:
    from pipelines.export.program import Kind
    from pipelines.export.triton_server import Backend


class Format(StrEnum):
    """What `--format` takes."""

    HUGGINGFACE = "huggingface"
    BF16 = "bf16"
    PEFT = "peft"
    INT8 = "int8"
    INT4 = "int4"
    TRITON = "triton"
    TRITON_VLLM = "triton-vllm"
    ONNX = "onnx"
    TORCH_EXPORT = "torch-export"


@dataclass(frozen=True)
class Exported:
    """What the command says of an export; sizes in bytes."""

    model: str  # name@version
    format: str
    folder: str
    bytes: int
    registered_bytes: int
    bits_per_byte: float | None = None  # of what was written, where its numbers were rounded
    registered_bits_per_byte: float | None = None
    logit_difference: float | None = None  # the largest of a graph from the model


def export(
    model: Model,
    to: Annotated[
        Path,
        typer.Option("--to", help="A folder that is not there yet; or Triton's model repository."),
    ],
    form: Annotated[
        Format,
        typer.Option("--format", help="huggingface is the whole model, an adapter merged."),
    ] = Format.HUGGINGFACE,
    served_from: Annotated[
        Path | None,
        typer.Option(help="triton-vllm: the repository's path on the server, if not as here."),
    ] = None,
    group_size: Annotated[
        int, typer.Option(help="int4: weights that share a scale: 32, 64, 128 or 256.")
    ] = 128,
    workspace: Annotated[
        Path | None,
        typer.Option(help="int8, int4: where the held-out documents lie, if not in its own run."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a registered model in another form; int8 and int4 are measured as they were written."""
    check_mlflow_answers()
    from pipelines.tracking import registry

    name, _, which = model.partition("@")
    version = registry.find(name, which or registry.CHAMPION)
    source = registry.download(name, str(version.version))
    made: dict[str, float] = {}
    if form in (Format.TRITON, Format.TRITON_VLLM):
        from pipelines.export.triton_server import export_triton

        backend: Backend = "python" if form is Format.TRITON else "vllm"
        to = export_triton(source, to, name, version.version, backend, served_from)
    else:
        made = _write(source, to, form, group_size, workspace)
    result = Exported(
        model=f"{name}@{version.version}",
        format=form,
        folder=str(to.absolute()),
        bytes=folder_bytes(to),
        registered_bytes=sum(path.stat().st_size for path in source.glob("*.safetensors")),
        **made,
    )
    typer.echo(json.dumps(asdict(result), indent=2) if as_json else _describe(result))


def _write(
    source: Path, to: Path, form: Format, group_size: int, workspace: Path | None
) -> dict[str, float]:
    """Write the export; what was measured, by the names of `Exported`."""
    from pipelines.export import huggingface
    from pipelines.export.source import new_folder

    with new_folder(to) as folder:
        match form:
            case Format.HUGGINGFACE:
                huggingface.export_whole(source, folder)
            case Format.BF16:
                huggingface.export_bf16(source, folder)
            case Format.PEFT:
                huggingface.export_adapter(source, folder)
            case Format.INT8 | Format.INT4:
                return _write_quantized(source, folder, form, group_size, workspace)
            case Format.ONNX | Format.TORCH_EXPORT:
                from pipelines.export.program import export_program

                kind: Kind = "onnx" if form is Format.ONNX else "torch-export"
                return {"logit_difference": export_program(source, folder, kind)}
    return {}


def _write_quantized(
    source: Path, folder: Path, form: Format, group_size: int, workspace: Path | None
) -> dict[str, float]:
    from pipelines.export.quantized import export_quantized
    from pipelines.stages.held_out import read_held_out, score_export

    held_out = read_held_out(source, load_settings().runs, workspace)
    export_quantized(source, folder, 8 if form is Format.INT8 else 4, group_size)
    return {
        "bits_per_byte": score_export(folder, held_out.documents),
        "registered_bits_per_byte": held_out.bits_per_byte,
    }


def _describe(result: Exported) -> str:
    size = f"{file_size(result.bytes)} (registered weights {file_size(result.registered_bytes)})"
    lines = [f"{result.model} as {result.format} in {result.folder}", f"  size   {size}"]
    if result.bits_per_byte is not None and result.registered_bits_per_byte is not None:
        lost = result.bits_per_byte - result.registered_bits_per_byte
        lines.append(
            f"  score  {result.bits_per_byte:.4f} bits per byte, {lost:+.4f} against the "
            f"registered {result.registered_bits_per_byte:.4f}, on the same held-out documents"
        )
    if result.logit_difference is not None:
        lines.append(f"  check  run from the file, logits within {result.logit_difference:.1e}")
    if result.format in (Format.TRITON, Format.TRITON_VLLM):
        repository = Path(result.folder).parent.parent
        lines.append(f"  serve  tritonserver --model-repository {shlex.quote(str(repository))}")
    if result.format in (Format.HUGGINGFACE, Format.BF16, Format.INT8, Format.INT4):
        lines.append(f"  serve  vllm serve {shlex.quote(result.folder)}")
    return "\n".join(lines)
