"""One rank of a case: the recipe's model, trainer and two steps on fake devices."""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from pipelines.loading.dataloader import Batch
from pipelines.loading.sampler import micro_batches
from pipelines.models.config import DecoderConfig
from pipelines.models.initial_model import build_model
from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import resolve_layout
from pipelines.parallel.mesh import Mesh, build_mesh
from pipelines.parallel.parallelize import parallelize
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import override_values
from pipelines.training.checkpoint.checkpointer import Position
from pipelines.training.dry_run.collective_log import CollectiveLog
from pipelines.training.dry_run.dry_run import Case, RankReport
from pipelines.training.dry_run.fake_cuda import DEVICE, fake_devices, pretend_cuda
from pipelines.training.dry_run.fake_group import fake_group, fake_stages
from pipelines.training.dry_run.fake_kernels import fake_kernels
from pipelines.training.dry_run.memory_count import MemoryCount
from pipelines.training.dry_run.observer import Observer
from pipelines.training.dry_run.wait_log import WaitLog
from pipelines.training.hooks import Phase
from pipelines.training.policy_loss import KNOWN
from pipelines.training.precision import set_precision
from pipelines.training.trainer import Trainer

_STEPS = 2  # in the second one the moments exist, and all graphs are compiled
_ENOUGH = 2  # micro-batches; a third one would do as the second


def run_rank(case: Case, rank: int) -> RankReport:
    """Run the steps of one rank, and return what happened in the last one.

    Raises:
        UserError: as training would.
    """
    pretend_cuda()
    waits = WaitLog()
    with (
        fake_devices(case.hardware, waits),
        fake_kernels(case.hardware),
        fake_group(case.world, rank, case.hardware.devices_per_node),
    ):
        layout = resolve_layout(case.recipe.parallel, case.world)
        mesh = build_mesh(layout, DEVICE)
        recipe, repeats = _shortened(case.recipe, mesh)
        memory = MemoryCount({case.shape.vocab_size, -(-case.shape.vocab_size // layout.tp)})
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        collectives = CollectiveLog(mesh)
        observer = Observer(fake, memory, waits, collectives, repeats)
        with fake_stages(recipe, case.shape.width):
            _train(recipe, case.shape, mesh, fake, observer, memory)
        return RankReport(
            rank=rank,
            stage=mesh.coordinate("pp"),
            memory=memory.parts,
            collectives=[asdict(each) for each in collectives.found],
            waits=[
                {**wait._asdict(), "count": count, "reason": wait.reason}
                for wait, count in waits.found.items()
            ],
            flops=observer.flops,
            graphs=counters["stats"]["unique_graphs"],
        )


def _shortened(recipe: Recipe, mesh: Mesh) -> tuple[Recipe, int]:
    """Return the recipe with two micro-batches a step at most, and how many the first stands for.

    A pipeline runs them all: how many are under way at once, and their buffers, depend on it.
    """
    size, ways = recipe.train.fixed_micro_batch_size, mesh.dp_world
    number = micro_batches(recipe.train.global_batch_size, ways, size)
    if mesh.layout.pp > 1 or number <= _ENOUGH:
        return recipe, 1
    short = override_values(recipe, {"train.global_batch_size": ways * size * _ENOUGH})
    return short, number - 1


def _train(
    recipe: Recipe,
    shape: DecoderConfig,
    mesh: Mesh,
    fake: FakeTensorMode,
    observer: Observer,
    memory: MemoryCount,
) -> None:
    set_precision(recipe.train, mesh.device)
    model = build_model(recipe, shape)
    with tempfile.TemporaryDirectory() as folder, fake, observer.watching():
        laid = parallelize(model, mesh, recipe, Transformer.after_to_empty)
        del model
        memory.name("weights", laid.parameters())
        loader: Any = FakeLoader(recipe, mesh)
        trainer = Trainer(recipe, laid, loader, _ignore, Path(folder), Path(folder))
        for part in laid.parts:
            part.train()

        def enter_phase(_: int, phase: Phase) -> None:
            memory.name("gradients", [each.grad for each in trainer.parameters])
            observer.enter_phase(phase)

        with patch.object(trainer.watchdog, "enter_phase", enter_phase):
            for step in range(_STEPS):
                if step == _STEPS - 1:
                    observer.begin_last_step()
                trainer._step(Position(step))
                trainer.consensus.is_wanted()
        memory.name("optimizer", [*trainer.optimizer.state.values()])


def _ignore(_: Any) -> None:
    pass


class FakeLoader:
    """Yields micro-batches of the right sizes, as `TokenLoader` does."""

    def __init__(self, recipe: Recipe, mesh: Mesh) -> None:
        train, data = recipe.train, recipe.data
        self.tokens_per_step = train.global_batch_size * data.sequence_length
        self.has_mask = data.instruction.kind != "none"
        self.most_documents = 1
        self.states: dict[str, Any] = {}
        self._rewarded = recipe.reinforcement.is_on
        self._documents = data.document_mask or self._rewarded
        self._number = micro_batches(
            train.global_batch_size, mesh.dp_world, train.fixed_micro_batch_size
        )
        self._shape = train.fixed_micro_batch_size, data.sequence_length
        self._device = mesh.device

    def micro_batches(self, _step: int) -> Iterator[tuple[Batch, bool]]:
        """Yield the micro-batches of any step."""
        samples, length = self._shape
        for number in range(self._number):
            ids = torch.zeros((samples, length + 1), dtype=torch.int64, device=self._device)
            documents = known = None
            if self._documents:
                documents = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            if self._rewarded:
                known = torch.zeros((samples, KNOWN * length), device=self._device)
            yield Batch(ids[:, :-1], ids[:, 1:], documents, known), number == self._number - 1
