"""evaluate: how well the model predicts held-out text, beside n-grams and xz on the same text.

The result depends only on the model, the held-out documents and the recipe, not on a champion. Work
is divided into tasks that `map_ordered` may run anywhere. Their number depends only on the
documents, so the same batches make the same sums on any number of workers.
"""

import hashlib
import logging
import math
import re
from collections.abc import Callable
from functools import partial
from operator import call
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.core import extensions
from pipelines.core.storage import fresh_folder, write_json
from pipelines.data.passes import MapOrdered, map_in_process
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.section import Extension
from pipelines.run.progress import ProgressWriter
from pipelines.run.records import (
    PAIRS_FILE,
    TASK_SCORES,
    TRAIN,
    VALIDATION,
    DatasetRef,
    EvaluateRecord,
    PreprocessRecord,
    TrainRecord,
    output_folder,
)
from pipelines.run.verdict import BehaviourScore, Probes, RightSize, ServedCheck
from pipelines.stages.evaluate.probing import gather_probes, probe_tasks
from pipelines.stages.evaluate.right_sizing import FIGURE, Sized, right_size, size_metrics
from pipelines.stages.evaluate.scoring import Scoring
from pipelines.tracking.tracked_run import open_run

if TYPE_CHECKING:
    import pyarrow as pa

    from pipelines.evaluation.exact_match import Answer
    from pipelines.evaluation.harness import Found
    from pipelines.evaluation.preferences import Shown

# Functions that use pyarrow, torch and matplotlib import them: an Airflow worker, which has none of
# them, calls `publish`, and a task for baselines needn't wait for torch.

STAGE = EvaluateRecord.stage
ARTIFACTS = (
    "report.html",
    "loss_curve.csv",
    "loss_curve.png",
    "slices.csv",
    "samples.json",
    "answers.json",
    "probes.json",
    "scores.parquet",
    TASK_SCORES,
)
QUESTIONS_PER_TASK = 4
BASELINE_TRAINING_BYTES = 32 << 20  # text that n-grams are fitted on; takes 6 s and 1 GB of memory
BOUND_CONFIDENCE = 0.975  # for each end of an interval, so that the interval holds with 0.95
SAMPLE_TEMPERATURE = 0.7  # low enough to read well, high enough not to repeat itself

_UNNAMED = re.compile(r"^\.+|[^\w.\-: @]")  # not allowed in a metric's name

_Task = Callable[[], Any]
_log = logging.getLogger(__name__)


class _HeldOut(NamedTuple):
    """The text that the model is measured on, and the text that the baselines learn from."""

    folder: Path  # outputs/preprocess
    dataset: DatasetRef
    shares: dict[str, dict[str, int]]  # bytes of each dataset's folder, by split
    documents: "pa.Table"
    pairs: "pa.Table"  # the documents and, of labelled answers, the bad ones
    of_datasets: "dict[str, pa.Table]"  # the documents of each part of a mixture, by its label


class _Measured(NamedTuple):
    """What the tasks of the stage found."""

    scores: "pa.Table"
    baselines: dict[str, float]
    fitted_bytes: int  # of training text, which the n-grams were fitted on
    samples: list[dict[str, str]]
    behaviours: tuple[BehaviourScore, ...]
    harness: "Found"
    answers: "list[Answer]"
    pairs: "pa.Table | None"  # the scores of both answers of each
    shown: "list[Shown]"
    metrics: dict[str, float]
    served: tuple[ServedCheck, ...]
    probes: Probes
    probed: dict[str, Any]  # the documents behind the probes' figures, for a user


def run(
    recipe: Recipe, workspace: Path, map_ordered: MapOrdered = map_in_process
) -> EvaluateRecord:
    """Measure `outputs/train/model` on held-out documents and write `outputs/evaluate`."""
    workspace = workspace.absolute()
    held_out = _read_held_out(recipe, workspace)
    trained = output_folder(workspace, TrainRecord.stage) / TrainRecord.read(workspace).model
    progress = ProgressWriter(workspace, STAGE)
    scoring = Scoring(held_out.documents, held_out.of_datasets, recipe.evaluate.stride, progress)
    score = partial(scoring.folders, map_ordered)
    sized = right_size(recipe.evaluate, trained, workspace, score, map_ordered)
    check = partial(_check_served, recipe, workspace, trained, sized.folder, held_out)
    measured = _measure(recipe, held_out, scoring, sized, check, map_ordered)
    record = _record(recipe, measured, held_out.of_datasets, sized.found)
    with fresh_folder(output_folder(workspace, STAGE)) as folder:
        _write_outputs(recipe, folder, workspace, record, measured, held_out.documents)
        sized.keep(folder)
    record.write(workspace)
    publish(workspace)
    return record


def publish(workspace: Path) -> None:
    """Log the stage's results, including restored ones, to the workspace's MLflow run."""
    record = EvaluateRecord.read(workspace)
    baselines = {f"baseline/{name}": value for name, value in record.baselines.items()}
    datasets = {f"bits_per_byte/{label}": bits for label, bits in record.datasets.items()}
    named = {"bits_per_byte": record.bits_per_byte, "perplexity": record.perplexity}
    named |= {f"behaviour/{each.name}": each.passed / each.cases for each in record.behaviours}
    if record.exact_match:
        named["exact_match"] = record.exact_match.share.value
    named |= record.pairs.figures() if record.pairs else {}
    named |= record.probes.figures() | _harness_metrics(record)
    named |= {f"metric/{name}": value for name, value in record.metrics.items()}
    named |= size_metrics(workspace, record.right_size)
    with open_run(workspace) as tracked:
        tracked.log_results(named | datasets | baselines | _slice_metrics(record))
        for name in ARTIFACTS:
            tracked.log_artifact(output_folder(workspace, STAGE) / name, STAGE)
        if record.right_size and (workspace / FIGURE).is_file():
            tracked.log_artifact(workspace / FIGURE, STAGE)


def _slice_metrics(record: EvaluateRecord) -> dict[str, float]:
    """Return metrics such as `bits_per_byte/language/ko`, in characters that MLflow accepts."""
    return {
        f"bits_per_byte/{each.slice.dimension}/{_UNNAMED.sub('_', each.slice.name)}": (
            each.bits_per_byte.value
        )
        for each in record.slices
    }


def _harness_metrics(record: EvaluateRecord) -> dict[str, float]:
    """Return metrics such as `harness/arc_easy/acc` and `harness/arc_easy/acc_stderr`."""
    metrics = {}
    for each in record.harness:
        name = "/".join(_UNNAMED.sub("_", part) for part in (each.task, *each.metric.split("/")))
        metrics[f"harness/{name}"] = each.value
        if each.stderr is not None:
            metrics[f"harness/{name}_stderr"] = each.stderr
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _read_held_out(recipe: Recipe, workspace: Path) -> _HeldOut:
    from pipelines.evaluation.held_out_documents import each_once, read_shares, without_bad_answers

    folder = output_folder(workspace, PreprocessRecord.stage)
    dataset = PreprocessRecord.read(workspace).dataset
    shares = {
        TRAIN: dataset.shares(BASELINE_TRAINING_BYTES),
        VALIDATION: dataset.shares(recipe.evaluate.max_bytes),
    }
    tables = read_shares(folder, VALIDATION, shares[VALIDATION])
    of_datasets = {part.label: tables[part.folder] for part in dataset.mixture}
    every = each_once(tables.values())
    return _HeldOut(folder, dataset, shares, without_bad_answers(every), every, of_datasets)


def _measure(
    recipe: Recipe,
    held_out: _HeldOut,
    scoring: Scoring,
    sized: Sized,
    check_served: _Task,
    map_ordered: MapOrdered,
) -> _Measured:
    """Run all tasks, the longest first; the other workers score documents meanwhile."""
    model = sized.folder
    single: list[_Task] = [
        partial(_baselines, held_out.folder, held_out.shares),
        check_served,
        partial(_write_samples, model, recipe),
        partial(_run_tests, model, recipe),
        partial(_run_harness, model, recipe),
        partial(_score_pairs, model, recipe, held_out.pairs),
    ]
    texts = held_out.documents["text"].to_pylist() if recipe.evaluate.extensions else []
    own: list[_Task] = [
        partial(_own_metric, each, model, texts) for each in recipe.evaluate.extensions
    ]
    answering = _answer_tasks(recipe, model, held_out.documents)
    probing = probe_tasks(recipe, model, held_out.folder, held_out.dataset, BOUND_CONFIDENCE)
    unscored = [] if sized.scores else scoring.tasks(model)
    results = map_ordered(call, [*single, *own, *probing, *answering, *unscored])
    fitted, served, samples, behaviours, harness, pairs = (next(results) for _ in single)
    baselines, fitted_bytes = fitted
    metrics = dict(figure for _ in own for figure in next(results))
    probes, probed = gather_probes(results)
    answers = [answer for _ in answering for answer in next(results)]
    return _Measured(
        scores=sized.scores or scoring.joined(results),
        baselines=baselines,
        fitted_bytes=fitted_bytes,
        samples=samples,
        behaviours=behaviours,
        harness=harness,
        answers=answers,
        pairs=pairs and pairs[0],
        shown=pairs[1] if pairs else [],
        metrics=metrics,
        served=served,
        probes=probes,
        probed=probed,
    )


def _check_served(
    recipe: Recipe, workspace: Path, trained: Path, served: Path, held_out: _HeldOut
) -> tuple[ServedCheck, ...]:
    """Return whether the folders are the model that was trained; `served` is a form of it."""
    from pipelines.evaluation.served_text import check_text
    from pipelines.evaluation.served_weights import Adapter, check_weights
    from pipelines.models.check_batch import CHECK_BATCH, CheckBatch

    path = output_folder(workspace, TrainRecord.stage) / CHECK_BATCH
    batch = CheckBatch.load(path) if path.is_file() else None
    adapter, base = TrainRecord.read(workspace).adapter, recipe.model.init_from
    learnt = None
    if adapter is not None and base is not None:
        learnt = Adapter(trained.with_name(adapter), Path(base), recipe.adapter.kind == "qlora")
    weights = check_weights(trained, batch, learnt)
    folder, dataset, documents = held_out.folder, held_out.dataset, held_out.documents
    return weights + check_text(served, folder, dataset, documents)


def _answer_tasks(recipe: Recipe, model: Path, documents: "pa.Table") -> list[_Task]:
    """Return tasks that each answer some of the held-out questions that the recipe asks for."""
    from pipelines.evaluation.exact_match import answer_questions, find_questions

    asked = recipe.evaluate.questions
    questions = find_questions(documents, asked.pattern, asked.most)
    return [
        partial(
            answer_questions,
            model,
            questions[start : start + QUESTIONS_PER_TASK],
            asked.pattern,
            asked.max_tokens,
        )
        for start in range(0, len(questions), QUESTIONS_PER_TASK)
    ]


def _write_samples(model: Path, recipe: Recipe) -> list[dict[str, str]]:
    from pipelines.evaluation.generate import generate

    prompts, length = recipe.evaluate.prompts, recipe.evaluate.sample_tokens
    made = generate(
        model,
        prompts,
        length,
        temperature=SAMPLE_TEMPERATURE,
        seed=recipe.seed,
        chat=recipe.data.instruction.is_chat,
    )
    return [{"prompt": p, "continuation": text} for p, text in zip(prompts, made, strict=True)]


def _run_tests(model: Path, recipe: Recipe) -> tuple[BehaviourScore, ...]:
    from pipelines.evaluation.behaviour import run_tests

    return run_tests(model, recipe.evaluate.behaviour, recipe.evaluate.stride)


def _run_harness(model: Path, recipe: Recipe) -> "Found":
    from pipelines.evaluation.harness import run_harness

    chat = recipe.data.instruction.is_chat
    return run_harness(model, recipe.evaluate.harness, chat=chat)


def _score_pairs(
    model: Path, recipe: Recipe, documents: "pa.Table"
) -> "tuple[pa.Table, list[Shown]] | None":
    """Return the scores of the held-out pairs, and some to show, if the data are pairs."""
    if recipe.preference.kind == "none":
        return None
    from pipelines.evaluation.preferences import score_pairs, show_pairs

    base = recipe.model.init_from if recipe.preference.needs_reference else None
    reference = None if base is None else Path(base)
    scores = score_pairs(model, documents, recipe.evaluate.stride, reference)
    return scores, show_pairs(model, documents, recipe.evaluate.sample_tokens)


def _own_metric(metric: Extension, model: Path, texts: list[str]) -> list[tuple[str, float]]:
    """Return the figures of a metric of a team's own package, each named after it."""
    measure = extensions.load("metrics", metric.name)
    found = extensions.call("metrics", metric.name, measure, model, texts, **metric.settings)
    return [(f"{metric.name}/{_UNNAMED.sub('_', key)}", float(found[key])) for key in found]


def _baselines(preprocess: Path, shares: dict[str, dict[str, int]]) -> tuple[dict[str, float], int]:
    """Return each baseline's bits per byte on the documents that the model is scored on.

    The second value is how many bytes of training text the n-grams were fitted on.
    """
    from pipelines.evaluation.baselines import ngram_bits_per_byte, xz_bits_per_byte
    from pipelines.evaluation.held_out_documents import each_once, read_shares, scored_texts

    tables = (each_once(read_shares(preprocess, *each).values()) for each in shares.items())
    training, held_out = ([text.encode() for text in scored_texts(table)] for table in tables)
    ngrams = ngram_bits_per_byte(training, held_out)
    named = {f"ngram-{order}": bits for order, bits in ngrams.items()}
    return named | xz_bits_per_byte(held_out), sum(map(len, training))


def _record(
    recipe: Recipe,
    measured: _Measured,
    of_datasets: "dict[str, pa.Table]",
    sized: RightSize | None,
) -> EvaluateRecord:
    import pyarrow.compute as pc

    from pipelines.evaluation.bootstrap import bits_per_byte, token_perplexity
    from pipelines.evaluation.exact_match import score_answers
    from pipelines.evaluation.preferences import pair_score
    from pipelines.evaluation.slices import score_slices

    scores = measured.scores
    interval, slices = score_slices(scores, BOUND_CONFIDENCE)
    record = EvaluateRecord(
        bits_per_byte=bits_per_byte(scores),
        perplexity=token_perplexity(scores),
        documents=len(scores),
        bytes=sum(scores["bytes"].to_pylist()),
        data_hash=hashlib.sha256("\n".join(scores["doc_id"].to_pylist()).encode()).hexdigest(),
        baselines=measured.baselines,
        samples=tuple(each["prompt"] + each["continuation"] for each in measured.samples),
        datasets={
            label: bits_per_byte(scores.filter(pc.field("doc_id").isin(table["doc_id"])))
            for label, table in of_datasets.items()
        },
        stride=recipe.evaluate.stride,
        interval=interval,
        slices=slices,
        behaviours=measured.behaviours,
        exact_match=score_answers(measured.answers, BOUND_CONFIDENCE),
        pairs=measured.pairs and pair_score(measured.pairs, recipe.preference, BOUND_CONFIDENCE),
        probes=measured.probes,
        harness=measured.harness.scores,
        right_size=sized,
        served=measured.served,
        metrics=measured.metrics,
    )
    _log.info("%.4f bits per byte on %d documents", record.bits_per_byte, record.documents)
    for each in measured.served:
        if not each.holds:
            _log.warning("register will refuse the model: %s", each)
    return record


def _write_outputs(
    recipe: Recipe,
    folder: Path,
    workspace: Path,
    record: EvaluateRecord,
    measured: _Measured,
    documents: "pa.Table",
) -> None:
    import pyarrow.parquet as pq

    from pipelines.evaluation.evaluation_page import Evaluation, write_report
    from pipelines.evaluation.loss_curve import CURVE, draw_loss_curve, read_history, write_curve
    from pipelines.evaluation.preferences import pair_rows
    from pipelines.evaluation.slices import write_slices
    from pipelines.evaluation.task_scores import of_answers, task_table

    write_json(folder / "answers.json", [answer._asdict() for answer in measured.answers])
    write_json(folder / "probes.json", measured.probed)
    write_json(folder / "samples.json", measured.samples)
    pq.write_table(measured.scores, folder / "scores.parquet")
    rows = [*of_answers(measured.answers), *measured.harness.rows]
    if measured.pairs is not None:
        pq.write_table(measured.pairs, folder / PAIRS_FILE)
        rows += pair_rows(measured.pairs, recipe.preference)
    pq.write_table(task_table(rows), folder / TASK_SCORES)
    preprocess = PreprocessRecord.read(workspace)
    history = output_folder(workspace, TrainRecord.stage) / "history.jsonl"
    points = read_history(history, preprocess.dataset.train)
    write_curve(points, folder / CURVE)
    curve = folder / "loss_curve.png"
    draw_loss_curve(points, curve)
    write_slices(record.slices, folder / "slices.csv")
    evaluation = Evaluation(
        record=record,
        preprocess=preprocess,
        train=TrainRecord.read(workspace),
        scores=measured.scores,
        documents=documents,
        samples=measured.samples,
        pairs=measured.shown,
        fitted_bytes=measured.fitted_bytes,
    )
    write_report(evaluation, curve, folder / "report.html")
