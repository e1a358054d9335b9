"""Printing of what `penstock models export` wrote."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core.formatting import size
from pipelines.export.formats import GGUF, TRITON, VLLM_LOADS

if TYPE_CHECKING:
    from pipelines.export.right_size import AssessedVariant, Budget


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


def describe(result: Exported) -> str:
    """Return lines that say what was written, how good it is and how to serve it."""
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
    if result.format in TRITON:
        repository = Path(result.folder).parent.parent
        lines.append(f"  serve  tritonserver --model-repository {shlex.quote(str(repository))}")
    if result.format in GGUF:
        from pipelines.export.gguf_file import FILE

        path = shlex.quote(str(Path(result.folder) / FILE))
        lines.append(f"  serve  llama-server --model {path} --ctx-size {result.context_length}")
    if result.format in VLLM_LOADS:
        lines.append(f"  serve  vllm serve {shlex.quote(result.folder)}")
    return "\n".join(lines)


def table(judged: "list[AssessedVariant]", budget: "Budget") -> str:
    """Return a table of the variants that were measured for a memory budget."""
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
