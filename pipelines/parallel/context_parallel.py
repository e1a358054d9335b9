"""Attention over a sequence of which each process has a part: DeepSpeed-Ulysses.

Before attention the processes exchange parts of the sequence for parts of the heads, and after it
back. In between each has the whole sequence with some heads, so any attention, with any mask, works
as in one process, and all have equally much to do. An exchange sends each number of a process once,
however many processes there are. Queries travel while keys and values are computed, and gradients
likewise.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of
Extreme Long Sequence Transformer Models", arXiv 2309.14509, section 3.

Shape suffixes: B batch, S sequence, P this process's part of it, F features of all heads, G those
of this process's heads, K key-value heads, H head width, W processes.

How a decoder is laid over processes that share each sequence: context parallel.

Each process has the embeddings, norms, feed-forward layers and the loss of its part of the
sequence. In attention it has some heads of the whole, so masks are those of one process. Rotary
positions are turned there; learned ones are looked up by their places in the whole.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from pipelines.models.transformer import Block, Transformer

# ruff: noqa: N803, N806 (names that end in their shape)


class PartOfHeads(ParallelStyle):
    """A module gives its output for the whole sequence, and for this process's heads only.

    Its output is on its way while the next module computes, and `Arrival` waits for it. Where there
    are fewer heads than processes, as of keys and values, several processes have the same one.
    """

    def __init__(self, head_width: int) -> None:
        super().__init__()
        self._head_width = head_width

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def started(_module: nn.Module, _inputs: Any, output_BPF: Tensor) -> Tensor:
            repeats = device_mesh.size() * self._head_width // output_BPF.shape[-1]
            if repeats > 1:
                heads_BPKH = output_BPF.view(*output_BPF.shape[:2], -1, self._head_width)
                output_BPF = heads_BPKH.repeat_interleave(repeats, dim=2).flatten(2)
            return start_to_heads(output_BPF, device_mesh)

        module.register_forward_hook(started)
        return module


class Arrival(nn.Module):
    """Waits for what `PartOfHeads` has started: [W, B, P, G] on its way to [B, S, G]."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._group = _name(mesh)

    def forward(self, started_WBPG: Tensor) -> Tensor:
        """Return the whole sequence, of this process's heads."""
        return _finish(started_WBPG, self._group).transpose(0, 1).flatten(1, 2)


class PartOfSequence(ParallelStyle):
    """The way back: a module is given all heads, for this process's part of the sequence only."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def exchanged(_module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            return (to_sequence(inputs[0], device_mesh),)

        # Before what tensor parallelism does: heads are what it divides.
        module.register_forward_pre_hook(exchanged, prepend=True)
        return module


def start_to_heads(x_BPF: Tensor, mesh: DeviceMesh) -> Tensor:
    """[B, P, F] to [W, B, P, G] on its way to `Arrival`.

    Heads lie one behind the other in F, and F divides by processes.
    """
    batch, part, _ = x_BPF.shape
    x_WBPG = x_BPF.view(batch, part, mesh.size(), -1).permute(2, 0, 1, 3)
    return _start(x_WBPG, _name(mesh))


def to_sequence(x_BSG: Tensor, mesh: DeviceMesh) -> Tensor:
    """[B, S, G] to [B, P, F]; S divides by processes."""
    batch, _, features = x_BSG.shape
    x_WBPG = x_BSG.view(batch, mesh.size(), -1, features).transpose(0, 1)
    name = _name(mesh)
    return _finish(_start(x_WBPG, name), name).permute(1, 2, 0, 3).flatten(2)


def _name(mesh: DeviceMesh) -> str:
    return mesh.get_group().group_name


def _start(x_W: Tensor, group: str) -> Tensor:
    """Row w goes to process w, and what comes from process w is row w; so do gradients."""
    return _Start.apply(x_W, group)  # type: ignore[no-any-return, no-untyped-call]


def _finish(started_W: Tensor, group: str) -> Tensor:
    return _Finish.apply(started_W, group)  # type: ignore[no-any-return, no-untyped-call]


class _Start(torch.autograd.Function):
    """Begins an exchange; its gradient waits for the exchange that `_Finish` has begun.

    So gradients of several tensors travel at the same time, too: autograd goes back through every
    `_Finish` before it comes to the first `_Start`, and computes while the others travel.
    """

    @staticmethod
    def forward(_ctx: Any, x_W: Tensor, group: str) -> Tensor:
        return _launch(x_W, group)

    @staticmethod
    def backward(_ctx: Any, gradient_W: Tensor) -> Any:
        return torch.ops._c10d_functional.wait_tensor(gradient_W), None


class _Finish(torch.autograd.Function):
    """Waits for an exchange; its gradient begins the exchange back."""

    @staticmethod
    def forward(ctx: Any, started_W: Tensor, group: str) -> Tensor:
        ctx.group = group
        arrived_W: Tensor = torch.ops._c10d_functional.wait_tensor(started_W)
        return arrived_W

    @staticmethod
    def backward(ctx: Any, gradient_W: Tensor) -> Any:
        return _launch(gradient_W, ctx.group), None


def _launch(x_W: Tensor, group: str) -> Tensor:
    rows = [1] * len(x_W)
    sent_W = x_W.contiguous()
    started_W: Tensor = torch.ops._c10d_functional.all_to_all_single(sent_W, rows, rows, group)
    return started_W


def context_parallel(part: Transformer, mesh: DeviceMesh) -> None:
    """Give a decoder, or a stage of one, its part of each sequence, in place.

    It is called with whole sequences, as before, and after `tensor_parallel` if both are wanted.
    What it returns is of its part: the nats of its positions, or their logits. Over the processes
    nats add up, and so do gradients. `check_division` has found that heads and positions divide.
    """
    config = part.config
    of_latents = {"kv_b_proj": config.qk_nope_head_dim + config.value_width}
    of_latents["k_rope_proj"] = config.rotary_width  # one head, which all processes get
    styles: dict[str, ParallelStyle] = {
        name: PartOfHeads(of_latents.get(name, config.head_width))
        for name in config.attention_shapes
        if not name.endswith("a_proj")
    }
    styles["o_proj"] = PartOfSequence()
    plan = {
        f"layers.{number}.self_attn.{name}": style
        for number in part.layers
        for name, style in styles.items()
    }
    parallelize_module(part, mesh, plan)
    part.context = mesh.get_local_rank(), mesh.size()
    for layer in part.layers.values():
        attention = cast("Block", layer).self_attn
        attention.arrival, attention.context = Arrival(mesh), part.context
    for router in part.routers.values():
        router.sequence = mesh
    part.sequence_shards *= mesh.size()
