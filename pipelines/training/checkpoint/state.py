"""The state of a run in a checkpoint, its copy on the host, and the hash that identifies a run."""

import hashlib
import json
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.optim import Optimizer

from pipelines.loading.sources.readers import device_threads
from pipelines.models.model_folder import fingerprint
from pipelines.models.weights import host_like, local
from pipelines.parallel.parallelize import Parallelized
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import DatasetRef

State = dict[str, Tensor]


def state_of(model: Parallelized, optimizer: Optimizer) -> State:
    """Return this process's weights and moments by canonical names; nothing is copied.

    What lies on the host may be read and written: the device no longer uses it.

    The names, such as `model.norm.weight` and `optimizer.norm.weight.exp_avg`, do not depend on the
    layout, so any layout loads what another saved. Frozen weights are left out, as they are those
    of the base model, and so is the learning rate, which follows from the step.
    """
    state = {f"model.{name}": each for name, each in model.changed().items()}
    for name, parameter in model.trained().items():
        for key, value in optimizer.state[parameter].items():
            state[f"optimizer.{name}.{key}"] = value
    on_host = any(local(each).device.type == "cpu" for each in state.values())
    if on_host and model.mesh.device.type != "cpu":
        torch.accelerator.current_stream().synchronize()  # paged moments may be on their way
    return state


def make_moments(optimizer: Optimizer) -> None:
    """Make the state of an optimizer that has not stepped yet, so that it can be loaded into."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class HostStager(AsyncStager):
    """Copies a state to buffers on the host, which are reused for the next save.

    The copy runs in parallel with work that only reads the state: a forward and a backward pass.
    From an accelerator it goes to pinned memory on its own stream; from the host, in a thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._pool = device_threads(1, "checkpoint-staging", device)
        self._buffers: State = {}
        self._from_host: Future[State] | None = None
        self._copied: Future[State] | None = None

    def stage(self, state_dict: State) -> Future[State]:
        """Begin to copy; the future's result is the complete copy."""
        on_host = {n: each for n, each in state_dict.items() if local(each).device.type == "cpu"}
        self._from_host = self._copied = self._pool.submit(self._copy, on_host)
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())
            with self._stream:
                staged = self._copy({n: state_dict[n] for n in state_dict if n not in on_host})
            arrived = self._stream.record_event()
            self._copied = self._pool.submit(_together, arrived, staged, self._from_host)
        return self._copied

    def synchronize_staging(self) -> None:
        """Wait until the copy is complete, as the protocol requires."""
        if self._copied is not None:
            self._copied.result()

    def before_update(self) -> None:
        """Wait until the state may change; for what is on an accelerator, only its stream waits."""
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)
        if self._from_host is not None:
            self._from_host.result()

    def close(self) -> None:
        """End the copying thread."""
        self._pool.shutdown()

    @torch.no_grad()
    def _copy(self, state: State) -> State:
        return {name: self._copy_one(name, tensor) for name, tensor in state.items()}

    def _copy_one(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = host_like(tensor, pinned=self._stream is not None)
        buffer = self._buffers[name]
        local(buffer).copy_(local(tensor), non_blocking=True)
        return buffer


def _together(arrived: torch.Event, from_device: State, from_host: Future[State]) -> State:
    arrived.synchronize()
    return from_device | from_host.result()


# A run can be resumed with other values of these keys. They change neither a step's samples nor
# its result, except for the order of sums. A change of any other key starts training again.
_MAY_CHANGE = (
    "name",
    "description",
    "validation",
    "parallel",
    "evaluate",
    "register",
    "resources",
    "schedule",
    "model.init_from",  # the weights that lie there count, below
    "adapter.init_from",
    "reinforcement.samplers",
    "reinforcement.max_drift",  # limits of alarms, as are the next three
    "reinforcement.max_growth",
    "reinforcement.max_watched_loss",
    "reinforcement.max_mismatch",
    "data.reader",
    "train.max_seconds",  # what it chose is in the checkpoint (`training/schedule.py`)
    "train.micro_batch_size",
    "train.activation_checkpoint",
    "train.compile",
    "train.attention",
    "train.checkpoints",
    "train.more_checkpoints",
    "train.checkpoint_every",
    "train.copy_every",
    "train.keep_checkpoints",
    "train.keep_best",
    "train.log_every",
    "train.max_rollbacks",
    "train.stall_seconds",
    "train.profile_steps",
)


def identity(recipe: Recipe, dataset: DatasetRef) -> str:
    """Return a hash of all that determines a run's weights; a run with the same hash can resume.

    The layout, the number of processes and the division of the work are not part of it. The initial
    weights are: a checkpoint of adapters is useless on another base model.
    """
    values = recipe.to_dict()
    values["train"]["precision"] = recipe.train.fixed_precision  # never `auto`
    for name in _MAY_CHANGE:
        section, _, key = name.rpartition(".")
        del (values[section] if section else values)[key]
    starts = (recipe.model.init_from, recipe.adapter.init_from)
    weights = [folder and fingerprint(Path(folder)) for folder in starts]
    text = json.dumps([values, dataset.model_dump(mode="json"), weights], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
