"""train: from token shards to a model as a Hugging Face folder.

Every process of the job calls `run`: Ray Train's workers, torchrun's processes, or a single one.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.line_files import LineFile
from pipelines.core.storage import folder_hash, read_json, sync_folder
from pipelines.data.tokens.chat_encoder import ChatEncoder
from pipelines.data.tokens.tokenizer import Encoder
from pipelines.loading.dataloader import Loader, TokenLoader
from pipelines.loading.token_dataset import TokenDataset
from pipelines.models.check_batch import CHECK_BATCH, CheckBatch
from pipelines.models.initial_model import build_model, fill_model, model_shape
from pipelines.models.peft_format import save_adapter
from pipelines.models.pretrained import save_pretrained
from pipelines.parallel.mesh import Mesh, build_mesh
from pipelines.parallel.parallelize import Parallelized, parallelize
from pipelines.parallel.process_group import one_for_all, process_group, rank
from pipelines.recipe.recipe import Recipe
from pipelines.reinforcement.prompts import Prompts
from pipelines.reinforcement.rollout_loader import RolloutLoader
from pipelines.run.progress import ProgressWriter
from pipelines.run.records import (
    REFERENCES,
    DatasetRef,
    PreprocessRecord,
    TrainRecord,
    output_folder,
)
from pipelines.run.speed import CURVES
from pipelines.run.usage import holds
from pipelines.stage_cache.fingerprint import CODE_FILE
from pipelines.stages.stage_process import RAY_JOB_VARIABLE
from pipelines.stages.train.train_diagnostics import DIAGNOSTICS, conclude, describe
from pipelines.stages.train.train_layout import SettledLayout
from pipelines.stages.train.train_logbook import TrainLogbook
from pipelines.stages.train.train_rollouts import StartSamplers, begin_rollouts
from pipelines.tracking.tracked_run import MODEL_HASH_TAG, TrackedRun, open_run
from pipelines.training.checkpoint.further_places import further_places
from pipelines.training.checkpoint.state import identity
from pipelines.training.checkpoint.store import (
    CHECKPOINTS,
    CheckpointStore,
    checkpoints_of,
)
from pipelines.training.compile_check import check_compiled
from pipelines.training.hooks import Events
from pipelines.training.last_loss import last_loss
from pipelines.training.machines import Machines
from pipelines.training.metrics import History, Report, StepMetrics
from pipelines.training.precision import set_precision
from pipelines.training.recipe_check import check_recipe
from pipelines.training.reference import reference_name, use_reference
from pipelines.training.trainer import Trainer

STAGE = TrainRecord.stage
MODEL = "model"
ADAPTER = "adapter"
HISTORY = "history.jsonl"
READER_TAG = "penstock.reader"
LAYOUT_TAG = "penstock.layout"


def run(
    recipe: Recipe,
    workspace: Path,
    report: Report | None = None,
    last_step: int | None = None,
    start_samplers: StartSamplers | None = None,
    machines: Machines | None = None,
) -> TrainRecord | None:
    """Train the recipe's model on the workspace's token shards.

    Args:
        recipe: `data`, `model`, `train`, `seed` and the keys that `check_recipe` checks are used.
        workspace: A folder shared by all processes; `outputs/preprocess` is read.
        report: Also called with each point of the curves, on every process.
        last_step: The number of steps to end after, to repeat a run that a time limit ended.
        start_samplers: Starts processes that sample answers to learn from; None: rank 0 does.
        machines: Keeps work away from those whose hardware is wrong or too slow; None: nobody does.

    Returns:
        The record on rank 0, and None on the others.
    """
    stall, alone = recipe.train.stall_seconds, recipe.parallel.cpu_offload
    with process_group(stall, even_alone=alone) as device:
        with one_for_all():
            check_recipe(recipe)
            dataset = read_dataset(recipe, workspace)
            shape = model_shape(recipe, dataset.vocab_size)
        settled = SettledLayout(recipe, shape, device, workspace)
        recipe = settled.recipe
        mesh = build_mesh(settled.choice.layout, device, recipe.train.stall_seconds)
        with one_for_all():
            set_precision(recipe.train, device)
            loader = build_loader(recipe, dataset, workspace, mesh)
            model = build_model(recipe, shape)
        settled.choose_kernels(loader, device)
        recipe = settled.recipe
        with one_for_all():
            history = prepare(recipe, dataset, workspace, mesh)
            events = Events() if history is None else logbook(settled, workspace)
        with tracked_run(workspace) as tracked, settled.out_of_memory():
            check_compiled(recipe, shape, loader, mesh)
            parallelized = parallelize(model, mesh, recipe, partial(fill_model, recipe))
            look = None
            if isinstance(loader, RolloutLoader):
                begin_rollouts(loader, parallelized, shape, workspace, events, start_samplers)
                look = loader.look
            reporter = Reporter(workspace, history, tracked, filter(None, (look, report)))
            places = checkpoints_of(recipe, workspace), workspace / DIAGNOSTICS
            trainer = Trainer(recipe, parallelized, loader, reporter, *places, events, last_step)
            trainer.corruption.machines = trainer.stragglers.machines = machines or Machines()
            tags = {READER_TAG: loader.source, LAYOUT_TAG: json.dumps(settled.facts())}
            steps = train(trainer, dataset, workspace, tracked, tags, reporter.points)
            batch = last_loss(trainer)
        record = export(settled, parallelized, loader, batch, workspace, steps, history)
    if record is not None:
        tag_run(workspace, record)
        events.ended(record.steps, record.model_hash)
        trainer.checkpoints.finish_further()
    return record


def read_dataset(recipe: Recipe, workspace: Path) -> DatasetRef:
    """Return what the preprocess stage made.

    Raises:
        UserError: it is not of the kind that the recipe learns from.
    """
    dataset = PreprocessRecord.read(workspace).dataset
    kind = recipe.preference.kind
    if dataset.pairs != (kind != "none") or (dataset.labelled and kind != "kto"):
        raise UserError(
            f"preference.kind = {kind}, but the dataset holds {dataset.contents}; change one"
        )
    return dataset


def prepare(recipe: Recipe, dataset: DatasetRef, workspace: Path, mesh: Mesh) -> History | None:
    """Remove the files of an unfinished or another run; return the run's history on rank 0."""
    history = None
    if rank() == 0:
        world = mesh.layout.world
        holds(workspace, STAGE, workers=world, gpus=world if mesh.device.type == "cuda" else 0)
        shutil.rmtree(output_folder(workspace, STAGE), ignore_errors=True)
        for place in {str(workspace / CHECKPOINTS), checkpoints_of(recipe, workspace)}:
            CheckpointStore(place).claim(identity(recipe, dataset))
        history = History(workspace / CHECKPOINTS / HISTORY)
    return history


def logbook(settled: SettledLayout, workspace: Path) -> TrainLogbook:
    """Return the logbook that notes what happens to this run, in this layout."""
    return TrainLogbook(workspace, settled.facts(), settled.before, settled.recipe.train.steps)


def build_loader(recipe: Recipe, dataset: DatasetRef, workspace: Path, mesh: Mesh) -> Loader:
    """Return the loader of this process's batches of the training split, or of its own answers."""
    if recipe.reinforcement.is_on:
        room = recipe.data.sequence_length - recipe.reinforcement.max_tokens
        folder = output_folder(workspace, PreprocessRecord.stage)
        prompts = Prompts(folder, dataset, room, part=(mesh.rank, mesh.layout.world))
        return RolloutLoader(recipe, prompts, mesh)
    tokens = TokenDataset(
        output_folder(workspace, PreprocessRecord.stage),
        dataset.train,
        recipe.data.sequence_length,
        packed_length=dataset.packed_length,
        mixture=dataset.mixture,
        documents=recipe.data.document_mask,
        reader=recipe.data.reader,
        remote=dataset.remote,
        part=(mesh.rank, mesh.layout.world),
    )
    return TokenLoader.of(tokens, recipe, mesh)


def train(
    trainer: Trainer,
    dataset: DatasetRef,
    workspace: Path,
    tracked: TrackedRun | None,
    tags: Mapping[str, str],
    points: Sequence[StepMetrics],
) -> int:
    """Train to the end, and return the number of steps; all processes call this.

    The MLflow run gets the tags and the machine before, and what limited the points after.
    """
    if tracked is not None:
        describe(trainer, tags, workspace, tracked)
    if trainer.recipe.preference.needs_reference:
        file = workspace / CODE_FILE
        code = read_json(file)[STAGE] if file.is_file() else None
        name = reference_name(trainer.recipe, dataset, code)
        use_reference(trainer, workspace.absolute().parent / REFERENCES / name)
    # The steps of a checkpoint that counts are never taken again.
    trainer.checkpoints.before_complete = partial(sync_folder, workspace / CHECKPOINTS, "*.jsonl")
    if rank() == 0:
        trainer.checkpoints.further = further_places(trainer.recipe, workspace, trainer.events)
    position = trainer.fit()
    if tracked is not None:
        conclude(points, workspace, tracked)
    return position.step


@contextmanager
def tracked_run(workspace: Path) -> Iterator[TrackedRun | None]:
    """Yield the MLflow run on one process of each node, which also records the node's load."""
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        yield None
        return
    node = os.environ.get("NODE_RANK") or os.environ.get("GROUP_RANK", "0")  # Ray's or torchrun's
    curves = workspace / CURVES if rank() == 0 else None
    with open_run(workspace, curves) as tracked, tracked.system_metrics(f"node-{node}"):
        yield tracked


class Reporter:
    """The writer, on rank 0, of each point to the progress file, the history and MLflow."""

    def __init__(
        self,
        workspace: Path,
        history: History | None,
        tracked: TrackedRun | None,
        also: Iterable[Report],
    ) -> None:
        self._progress = ProgressWriter(workspace, STAGE)
        self._history = history
        self._tracked = tracked
        self._also = tuple(also)
        self.points: list[StepMetrics] = []  # since this process started, on rank 0

    def __call__(self, metrics: StepMetrics) -> None:
        """Record one point."""
        if self._tracked is not None:
            self._tracked.begin()
        if self._history is not None and self._tracked is not None:
            self.points.append(metrics)
            self._history.add(metrics.curve_point())
            self._progress.write(
                metrics.step,
                metrics.last_step,
                "steps",
                loss=metrics.loss,
                tokens_per_second=metrics.tokens_per_second,
                force=metrics.last,
            )
            self._tracked.log_metrics(metrics.curves(), step=metrics.step)
        for report in self._also:
            report(metrics)


def export(
    settled: SettledLayout,
    model: Parallelized,
    loader: Loader,
    batch: CheckBatch,
    workspace: Path,
    steps: int,
    history: History | None,
) -> TrainRecord | None:
    """Write model, tokenizer and curve, and the record last; all processes call this.

    Adapters are merged into the model, and are also written beside it. A model of conversations
    stops where an answer ends, too.
    """
    output = output_folder(workspace, STAGE)
    tokenizer = output_folder(workspace, PreprocessRecord.stage) / "tokenizer"
    if history is not None:
        shutil.copytree(tokenizer, output / MODEL, dirs_exist_ok=True)  # others write there, too
    answer = ChatEncoder(tokenizer).end_of_answer if loader.has_mask else None
    save_pretrained(model.modules, output / MODEL, Encoder(tokenizer).end_id, answer)
    has_adapter = settled.recipe.adapter.kind != "none"
    if has_adapter:
        save_adapter(model.modules, output / ADAPTER)
    if history is None:
        return None
    batch.save(output / CHECK_BATCH)
    LineFile(output / HISTORY).replace(history.lines())
    last = history.points[-1]
    record = TrainRecord(
        model=MODEL,
        model_hash=folder_hash(output / MODEL),
        adapter=ADAPTER if has_adapter else None,
        parameters=model.modules[0].config.parameters,
        steps=steps,
        tokens=steps * loader.tokens_per_step,
        layout=settled.facts(),
        alarms=tuple(loader.alarms.raised) if isinstance(loader, RolloutLoader) else (),
        metrics={key: last[key] for key in ("loss", "learning_rate", "gradient_norm")},
    )
    return record.write(workspace)


def tag_run(workspace: Path, record: TrainRecord) -> None:
    """Tag the MLflow run with the hash of its model and the id of its Ray job."""
    with open_run(workspace) as tracked:
        tracked.set_tags(
            {
                MODEL_HASH_TAG: record.model_hash,
                "penstock.ray_job_id": os.environ.get(RAY_JOB_VARIABLE, ""),
            }
        )
