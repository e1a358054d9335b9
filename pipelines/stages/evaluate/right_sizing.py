"""Right-sizing: choose the form of a model that fits `evaluate.budget_gb`.

bf16, int8 and int4 forms are written and scored on the held-out documents beside the trained model.
The chosen form is measured, compared and registered. It is loaded from its own files, so no figure
of a quantised model comes from the model that it was made from. If no form fits, the trained model
is measured, and register refuses it with each form's numbers.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import call
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.core.errors import UserError
from pipelines.core.storage import folder_hash, read_json, write_json
from pipelines.data.passes import MapOrdered
from pipelines.recipe.recipe import Evaluate
from pipelines.run.records import EvaluateRecord, TrainRecord, output_folder, record_path
from pipelines.run.verdict import FormScore, RightSize

if TYPE_CHECKING:
    import pyarrow as pa

    from pipelines.export.right_size import AssessedVariant, Budget
    from pipelines.export.variants import Made

MODEL = "model"  # in evaluate's output: the chosen form
SCRATCH = "forms"  # in the workspace, which all workers share
# Loading times differ between runs, so they are kept outside the outputs.
LOAD_SECONDS, FIGURE = "diagnostics/load_seconds.json", "diagnostics/right_size.png"

ScoreFolders = Callable[[Sequence[Path]], "list[pa.Table]"]


@dataclass(frozen=True)
class Sized:
    """The folder that evaluation measures, and its scores if right-sizing has made them."""

    folder: Path
    scores: "pa.Table | None" = None
    found: RightSize | None = None

    def keep(self, output: Path) -> None:
        """Move a chosen form into evaluate's output."""
        if self.found and self.found.chosen:
            self.folder.rename(output / MODEL)
            self.folder.parent.rmdir()


def right_size(
    wanted: Evaluate, trained: Path, workspace: Path, score: ScoreFolders, map_ordered: MapOrdered
) -> Sized:
    """Write and score a trained model's forms and choose one, or the model if there is no budget.

    Args:
        wanted: The budget, and the loss that is allowed.
        trained: The model's folder.
        workspace: The folder that the forms are written to; all but the chosen one are removed.
        score: Returns a table of per-document scores for each folder.
        map_ordered: Runs the tasks that write the forms.
    """
    if wanted.budget_gb is None:
        return Sized(trained)
    from pipelines.evaluation.bootstrap import bits_per_byte
    from pipelines.export.right_size import Budget, Variant, assess_variants
    from pipelines.models.model_folder import load_config

    scratch = workspace / SCRATCH
    made = _make_forms(trained, scratch, wanted.int4_group, map_ordered)
    tables = score([trained, *(scratch / each.form for each in made if not each.problem)])
    as_trained, *bits = map(bits_per_byte, tables)
    variants = [
        Variant(each.form, each.weight_bytes, figure, each.load_seconds)
        for each, figure in zip((m for m in made if not m.problem), bits, strict=True)
    ]
    config = load_config(trained)
    budget = Budget(
        wanted.budget_gb, wanted.budget_max_loss, wanted.budget_sequences, config.context_length
    )
    judged = assess_variants(variants, config, as_trained, budget)
    _keep_times(workspace, judged, budget)
    left_out = tuple(each.problem for each in made if each.problem)
    found = _decide(judged, budget, as_trained, left_out)
    if found.chosen is None:
        shutil.rmtree(scratch)
        return Sized(trained, tables[0], found)
    number = found.forms.index(found.chosen)
    for each in made:
        if each.form != found.chosen.form:
            shutil.rmtree(scratch / each.form)
    folder = scratch / found.chosen.form
    found = found.model_copy(update={"model_hash": folder_hash(folder)})
    return Sized(folder, tables[1 + number], found)


def served_model(workspace: Path) -> tuple[Path, str]:
    """Return the folder that is registered if it passes, and its content hash.

    Before evaluate has run, it is the trained model.
    """
    train, size = TrainRecord.read(workspace), None
    if record_path(workspace, EvaluateRecord.stage).is_file():
        size = EvaluateRecord.read(workspace).right_size
    if size is None or size.model_hash is None:
        return output_folder(workspace, TrainRecord.stage) / train.model, train.model_hash
    return output_folder(workspace, EvaluateRecord.stage) / MODEL, size.model_hash


def size_metrics(workspace: Path, size: RightSize | None) -> dict[str, float]:
    """Return each form's figures by name, with the loading time if this workspace measured it."""
    if size is None:
        return {}
    path = workspace / LOAD_SECONDS
    seconds: dict[str, float] = read_json(path) if path.is_file() else {}
    figures = {f"right_size/{form}/load_seconds": value for form, value in seconds.items()}
    for each in size.forms:
        figures[f"right_size/{each.form}/bits_per_byte"] = each.bits_per_byte
        figures[f"right_size/{each.form}/serving_gb"] = each.serving_bytes / 1e9
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _make_forms(trained: Path, scratch: Path, group: int, map_ordered: MapOrdered) -> "list[Made]":
    from pipelines.export.variants import FORMS, make_variant

    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    tasks = [partial(make_variant, trained, scratch, form, group) for form in FORMS]
    return list(map_ordered(call, tasks))


def _decide(
    judged: "list[AssessedVariant]", budget: "Budget", as_trained: float, left_out: tuple[str, ...]
) -> RightSize:
    from pipelines.export.right_size import choose

    forms = tuple(
        FormScore(
            form=each.variant.name,
            bits_per_byte=each.variant.bits_per_byte,
            lost=each.lost,
            weight_bytes=each.variant.weight_bytes,
            serving_bytes=each.memory.total,
            fits=each.fits,
            good=each.good,
        )
        for each in judged
    )
    chosen, refusal = None, None
    try:
        chosen = forms[judged.index(choose(judged, budget))]
    except UserError as error:
        refusal = "; ".join([str(error), *left_out])
    return RightSize(
        budget_gb=budget.gb,
        max_loss=budget.max_loss,
        sequences=budget.sequences,
        tokens=budget.tokens,
        trained_bits_per_byte=as_trained,
        forms=forms,
        left_out=left_out,
        chosen=chosen,
        refusal=refusal,
    )


def _keep_times(workspace: Path, judged: "list[AssessedVariant]", budget: "Budget") -> None:
    """Write the loading times, which differ between runs, and the figure, outside the outputs."""
    from pipelines.export.right_size import draw_right_size

    seconds = {each.variant.name: each.variant.load_seconds for each in judged}
    write_json(workspace / LOAD_SECONDS, seconds)
    draw_right_size(judged, budget, workspace / FIGURE)
