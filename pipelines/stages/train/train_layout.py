"""What replaces each `auto` of a recipe on the given processes, also after memory ran out."""

import logging
import math
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipelines.core.errors import UserError
from pipelines.loading.dataloader import Loader
from pipelines.models.config import DecoderConfig
from pipelines.parallel.layout import check_places
from pipelines.parallel.process_group import one_for_all, rank
from pipelines.planning.attention_rule import ATTENTION
from pipelines.planning.hardware import Hardware
from pipelines.planning.hardware_table import of_driver
from pipelines.planning.layout_rule import Choice, choose, is_left_to_the_rule
from pipelines.planning.precision_rule import (
    COMPILE,
    PRECISION,
    Device,
    is_settled,
    reasons,
    settle_precision,
)
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import get_dotted, override_values
from pipelines.stages.train.layout_file import FLASH, MICRO_BATCH, LayoutFile
from pipelines.stages.train.train_logbook import Facts, out_of_memory
from pipelines.training.attention_choice import Kernels, choose_kernels
from pipelines.training.recipe_check import check_attention

_log = logging.getLogger(__name__)


class SettledLayout:
    """The recipe of a run in which every `auto` is replaced.

    Attributes:
        choice: The layout that the rule chose, or that the recipe sets.
        before: The layout of the try before this one, as `facts` returns it; None in the first.
    """

    def __init__(
        self, recipe: Recipe, config: DecoderConfig, device: torch.device, workspace: Path
    ) -> None:
        """Choose precision and layout; every process calls this, and all get the same.

        Raises:
            UserError: No layout fits the smallest device.
        """
        self._config = config
        self._workspace, self._file = workspace, LayoutFile(workspace, recipe)
        world = dist.get_world_size() if dist.is_initialized() else 1
        mine = (
            device_bytes(device),
            self._file.read(),
            _datasheet(device),
            properties(device),
            socket.gethostname(),
        )
        known: list[Any] = [mine]
        if world > 1:
            known = [None] * world
            dist.all_gather_object(known, mine)
        self._bytes, (_, before, self._hardware, *_) = min(each[0] for each in known), known[0]
        self.before: Facts | None = before.get("layout")
        self._flash: str | None = before.get(FLASH)
        least = least_of([each[3] for each in known])
        recipe = self._recipe = self._with_precision(recipe, least)
        with one_for_all():
            check_attention(recipe)
            below = before.get("too_much", {}).get(str(world), math.inf)
            self.choice = self._choose(recipe, world, below)
            if self.choice.training.micro_batch > (most := before.get("most_samples", math.inf)):
                smaller = override_values(recipe, {MICRO_BATCH: most})
                self.choice = self._choose(smaller, world, below)
            if recipe.parallel.async_tp:
                check_places(self.choice.layout, device.type, [each[4] for each in known])
        if rank() == 0:
            _log.info("layout: %s", self.choice)

    def choose_kernels(self, loader: Loader, device: torch.device) -> None:
        """Choose what attends within documents, and note the layout; every process calls this.

        Raises:
            UserError: The recipe wants what some device can't do.
        """
        before = None
        if self.before is not None:  # a run of an earlier version noted less
            before = Kernels(self.before.get(ATTENTION, "flex"), self._flash)  # type: ignore[arg-type]
        kernels = choose_kernels(self.recipe, self._config, loader, device, before)
        laid = override_values(self.choice.laid, {ATTENTION: kernels.attention})
        self.choice = replace(self.choice, laid=laid)
        if rank() == 0:
            self._file.write(layout=self.facts(), **{FLASH: kernels.flash})

    @property
    def recipe(self) -> Recipe:
        """The recipe with a number in place of every `auto`."""
        return self.choice.recipe

    def facts(self) -> Facts:
        """Return the layout under the recipe's keys."""
        keys = [f"parallel.{name}" for name in vars(self.choice.layout)]
        keys += ["parallel.sharding", MICRO_BATCH, PRECISION, COMPILE, ATTENTION]
        return {key: get_dotted(self.recipe.to_dict(), key) for key in keys}

    @contextmanager
    def out_of_memory(self) -> Iterator[None]:
        """Let the next try use the rule's next layout, or tell the user which layout needs less.

        Raises:
            UserError: The recipe sets the whole layout, so the rule can't choose another.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            if is_left_to_the_rule(self._recipe):
                _log.warning("out of memory with %s; the next try takes less", self.choice)
                self._write_too_much()  # every process writes the same content
                out_of_memory(self._workspace, str(self.choice), "the next try takes less")
                raise
            advice = self._advice()
            out_of_memory(self._workspace, str(self.choice), advice)
            raise UserError(f"out of memory with {self.choice}; {advice}") from error

    def _with_precision(self, recipe: Recipe, device: Device) -> Recipe:
        """Return the recipe in the precision with which the run began, else in the device's."""
        if is_settled(recipe):
            return recipe
        if self.before is not None:  # what these devices would take may have other results
            return override_values(recipe, {key: self.before[key] for key in (PRECISION, COMPILE)})
        if rank() == 0:
            for line in reasons(recipe, device):
                _log.info("%s", line)
        return settle_precision(recipe, device)

    def _advice(self) -> str:
        free = override_values(self._recipe, {"parallel": "auto", MICRO_BATCH: "auto"})
        world, tried = self.choice.layout.world, self.choice.memory.total
        try:
            fits = self._choose(free, world, tried)
        except UserError as nothing:
            return str(nothing)
        return f"parallel: auto and train.micro_batch_size: auto would take {fits}"

    def _choose(self, recipe: Recipe, world: int, below: float) -> Choice:
        return choose(
            recipe, self._config, world, self._bytes, below=below, hardware=self._hardware
        )

    def _write_too_much(self) -> None:
        known = self._file.read().get("too_much", {})
        this = {str(self.choice.layout.world): self.choice.memory.total}
        self._file.write(too_much=known | this)


def device_bytes(device: torch.device) -> int:
    """Return the memory of a device; on a CPU, this process's share of the machine's memory."""
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[1]
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def properties(device: torch.device) -> Device:
    """Return what decides `train.precision: auto` and `train.compile: auto` on a device."""
    is_cuda = device.type == "cuda"
    has_bf16 = is_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    return Device(is_cpu=device.type == "cpu", has_bf16=has_bf16)


def least_of(devices: Sequence[Device]) -> Device:
    """Return the device of a run that decides for all: one without bf16, if there is any."""
    return min(devices, key=lambda each: each.trains_in_bf16)


def _datasheet(device: torch.device) -> Hardware | None:
    """Return the datasheet of the first process's GPU, if the hardware table has it."""
    if device.type != "cuda":
        return None
    return of_driver(torch.cuda.get_device_name(device))
