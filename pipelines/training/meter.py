"""How well a run uses its machine, window by window: from one log point to the next."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pipelines.loading.dataloader import Batch
from pipelines.parallel.parallelize import Parallelized
from pipelines.planning.roofs import Share, Utilisation, step_work, utilisation
from pipelines.recipe.recipe import Recipe
from pipelines.training.machine_report import hardware_of


@dataclass(frozen=True)
class Window:
    """The mean of a step between two log points, on this process.

    Attributes:
        seconds: Of the clock, without reports and checkpoints.
        peak_bytes: Most memory that tensors had so far; None on a CPU until that was measured.
    """

    seconds: float
    utilisation: Utilisation
    peak_bytes: int | None


class Meter:
    """Times steps and compares them with the device's roofs.

    Attributes:
        hardware: The denominators of MFU and MBU.
    """

    def __init__(self, recipe: Recipe, model: Parallelized, tokens_per_step: int) -> None:
        """Look up or measure the device, and work out what a step of so many tokens asks of it."""
        mesh = model.mesh
        train = recipe.train
        layout, sharded = mesh.layout, recipe.parallel.sharding != "none"
        trainable, frozen_bytes = _trainable(model)
        share = Share(
            tokens=tokens_per_step,
            length=tokens_per_step // train.global_batch_size,
            micro_batches=math.ceil(
                train.global_batch_size / mesh.dp_world / train.fixed_micro_batch_size
            ),
            model=layout.tp * layout.pp,
            data=layout.dp_cp,
            shards=layout.shards if sharded else 1,
            trainable=trainable,
            frozen_bytes=frozen_bytes,
            offloaded=recipe.parallel.cpu_offload,
        )
        self.hardware = hardware_of(mesh.device, train.precision)
        self._precision = train.precision
        self._work = step_work(model.modules[0].config, share, train.precision)
        self._begun = self._waited = 0.0

    def begin(self) -> None:
        """Begin a window: the device has nothing to do, or has just been waited for."""
        self._waited = 0.0
        self._begun = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since the window began, by the host: its device may be behind."""
        return time.perf_counter() - self._begun

    def waits(self, batches: Iterator[tuple[Batch, bool]]) -> Iterator[tuple[Batch, bool]]:
        """The same, timed: what the loader takes is what the step waits for."""
        while True:
            started = time.perf_counter()
            item = next(batches, None)
            self._waited += time.perf_counter() - started
            if item is None:
                return
            yield item

    def end(self, steps: int, network: float | None, peak_bytes: int | None) -> Window:
        """The window of the last steps; call it once the device has done them.

        Args:
            steps: In the window.
            network: The share of the time in which processes only talked, if it is known.
            peak_bytes: Of `memory_in_use`.
        """
        seconds = self.elapsed / steps
        used = utilisation(
            self._work,
            self.hardware,
            self._precision,
            seconds=seconds,
            network=network or 0.0,
            storage=self._waited / steps / seconds,
        )
        return Window(seconds, used, peak_bytes)


def _trainable(model: Parallelized) -> tuple[float, float]:
    """The part of the weights that is trained, and the bytes of one that is not."""
    parameters = model.parameters()
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    frozen = [each for each in parameters if not each.requires_grad]
    if not frozen:
        return 1.0, 0.0
    base = model.modules[0].config.parameters  # codes of 4 bits can't be counted as they lie
    held = sum(each.numel() * each.element_size() for each in frozen)
    return trained / (base + trained), held / base
