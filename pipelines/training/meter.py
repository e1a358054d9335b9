"""Measures how well a run uses its machine in each window, from one log point to the next."""

import time
from dataclasses import dataclass

from pipelines.loading.sampler import micro_batches
from pipelines.parallel.parallelize import Parallelized
from pipelines.planning.roofs import Share, Utilisation, step_work, utilisation
from pipelines.recipe.recipe import Recipe
from pipelines.training.hooks import Hook, Phase
from pipelines.training.machine_report import hardware_of


@dataclass(frozen=True)
class Window:
    """The mean step of this process between two log points.

    Attributes:
        seconds: Wall-clock time, without reports and checkpoints.
        peak_bytes: The most memory that tensors had so far; None on a CPU until it is measured.
    """

    seconds: float
    utilisation: Utilisation
    peak_bytes: int | None


class Meter(Hook):
    """Times steps and compares them with the device's limits (roofs).

    Attributes:
        hardware: The denominators of MFU and MBU.
    """

    def __init__(self, recipe: Recipe, model: Parallelized, tokens_per_step: int) -> None:
        """Look up or measure the device's limits, and compute the work of a step."""
        mesh = model.mesh
        train = recipe.train
        layout, sharded = mesh.layout, recipe.parallel.sharding != "none"
        trainable, frozen_bytes = _trainable(model)
        share = Share(
            tokens=tokens_per_step,
            length=tokens_per_step // train.global_batch_size,
            micro_batches=micro_batches(
                train.global_batch_size, mesh.dp_world, train.fixed_micro_batch_size
            ),
            model=layout.tp * layout.pp,
            data=layout.dp_cp,
            shards=layout.shards if sharded else 1,
            trainable=trainable,
            frozen_bytes=frozen_bytes,
            offloaded=recipe.parallel.cpu_offload,
            paged=recipe.parallel.paged_moments,
            ep=recipe.parallel.ep,
        )
        self.hardware = hardware_of(mesh.device, train.fixed_precision)
        self._precision = train.fixed_precision
        self._work = step_work(model.modules[0].config, share, train.fixed_precision)
        self._begun = self._waited = self._waits_since = 0.0
        self._is_waiting = False

    def begin_window(self) -> None:
        """Begin a window; call it when the device is idle or the host has just waited for it."""
        self._waited = 0.0
        self._begun = time.perf_counter()

    def enter_phase(self, step: int, phase: Phase) -> None:  # noqa: ARG002
        """Add up the time that steps wait for their data."""
        now = time.perf_counter()
        if self._is_waiting:
            self._waited += now - self._waits_since
        self._is_waiting, self._waits_since = phase == "data", now

    @property
    def elapsed(self) -> float:
        """Seconds since the window began, by the host's clock; the device may be behind."""
        return time.perf_counter() - self._begun

    def end(self, steps: int, network: float | None, peak_bytes: int | None) -> Window:
        """Return the window of the last steps; call it when the device has done them.

        Args:
            steps: The number of steps in the window.
            network: The share of the time in which processes only communicated, if known.
            peak_bytes: The result of `memory_in_use`.
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
    """Return the fraction of the weights that is trained, and the bytes of a frozen weight."""
    parameters = model.parameters()
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    frozen = [each for each in parameters if not each.requires_grad]
    if not frozen:
        return 1.0, 0.0
    base = model.modules[0].config.parameters  # numel() can't count packed 4-bit codes
    held = sum(each.numel() * each.element_size() for each in frozen)
    return trained / (base + trained), held / base
