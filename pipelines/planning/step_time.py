"""Formulas for the time of an optimizer step; no torch here.

A step's time is that of matrix products at a share of the peak, attention at its kernel's rate,
memory traffic between them, collectives that no computation hides, and a pipeline's filling and
draining. The share of the peak comes from the device's published MFU on `REFERENCE` and is the
same for every model and layout. `tests/unit/planning/test_published_time.py` compares the
predictions with tables that others measured.

Sources: Narayanan et al. 2021 (bubbles of 1F1B and interleaved stages); Qi et al. 2023 (zero
bubble, section 2: a third of 1F1B's); Korthikanti et al. 2022 (recomputation).

The speed of attention on a device comes from its kernels' published figures. It grows with the
sample's length and differs from that of matrix products: on an H100, FlashAttention 2 reaches a
third of the peak, and products two thirds. The figures count the operations that are done: half of
the scores, since the others are in the future, and in the backward pass 2.5 times as many
operations as in the forward pass, since scores are computed again.

Sources: Dao 2023 (FlashAttention-2), figures 4 and 7 (forward and backward pass together, causal),
as in `assets/flash2_{a100,h100}_fwd_bwd_benchmark.png` of github.com/Dao-AILab/flash-attention at
0251105a2fb19d2957484b7f023cd8c115286ced.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.parallel.layout import Schedule, stage_count
from pipelines.planning.communication import communication
from pipelines.planning.hardware import AttentionFigures, Hardware
from pipelines.planning.memory_state import NF4, adapter_parameters
from pipelines.planning.memory_training import Training, layers_by_rank
from pipelines.planning.roofs import (
    ACTIVATION_ACCESSES,
    Share,
    Work,
    activations_per_token,
    flops_per_token,
    matrix_parameters,
    step_work,
)
from pipelines.recipe.training_section import Precision

Kernel = Literal["flash-1", "flash-2"]
FLASH_1: Kernel = "flash-1"  # the kernel of the tables that the MFUs are from
FLASH_2: Kernel = "flash-2"  # the kernel in torch

FORWARD_SHARE = 1 / 3.5  # the forward pass's part of all operations: one of 1 + 2.5

_SHORTEST = 512
# TFLOP/s for samples of 512, 1k, 2k, 4k, 8k and 16k tokens, by width of a head. FlashAttention 1
# is the Triton version on an A100; for an H100 only the CUDA version has figures.
_FIGURES: dict[Kernel, dict[AttentionFigures, dict[int, tuple[int, ...]]]] = {
    "flash-1": {
        "a100": {64: (59, 75, 79, 76, 79, 80), 128: (50, 61, 68, 74, 78, 80)},
        "h100": {64: (104, 123, 136, 138, 149, 156), 128: (98, 109, 108, 126, 135, 137)},
    },
    "flash-2": {
        "a100": {64: (88, 119, 140, 156, 165, 171), 128: (99, 133, 155, 173, 182, 189)},
        "h100": {64: (141, 192, 232, 257, 273, 284), 128: (163, 221, 265, 294, 308, 328)},
    },
}
_PEAKS: dict[AttentionFigures, float] = {"a100": 312.0, "h100": 989.4}
# LLM Foundry pinned a later Triton kernel than the one in the figures. The factor is fitted to its
# rows for an A100 with 80 GB.
_PINNED = 1.2


def attention_flops(config: DecoderConfig, length: int) -> float:
    """Return the operations per token of both passes, as the figures count; windows are ignored."""
    forward = 4 * config.layers * length * config.heads * config.head_width / 2
    return forward / FORWARD_SHARE


def attention_share(
    length: int, head_width: int, figures: AttentionFigures, kernel: Kernel = FLASH_2
) -> float:
    """Return the fraction of a device's half-precision peak that attention reaches.

    Args:
        length: Tokens of a sample; beyond the longest measured sample the rate stays the same.
        head_width: The width of one head.
        figures: The measured device: this one, or the one that it resembles.
        kernel: The attention kernel.
    """
    rates = _FIGURES[kernel][figures][64 if head_width < 96 else 128]
    at = min(max(0.0, math.log2(length / _SHORTEST)), len(rates) - 1)
    below = min(int(at), len(rates) - 2)
    rate = rates[below] + (at - below) * (rates[below + 1] - rates[below])
    return rate * (_PINNED if kernel == FLASH_1 else 1.0) / _PEAKS[figures]


# `Hardware.mfu` is taken to be measured on this model: 3B, samples of 2048 tokens, no activation
# checkpointing, one node. It is LLM Foundry's MPT-3B, the middle of its tables.
REFERENCE = DecoderConfig(
    layers=32,
    width=2560,
    heads=20,
    kv_heads=20,
    hidden=4 * 2560,
    vocab_size=50_368,
    context_length=2048,
    gated=False,
    positions="learned",
)
REFERENCE_SEQUENCE = 2048
REFERENCE_TOKENS = 6 * REFERENCE_SEQUENCE  # per micro-batch

# If no MFU is published: the middle of the published ones, 0.30 (V100) to 0.57 (A100).
ASSUMED_MFU = 0.4

# These rates are fitted and the same on every device: the first to LLM Foundry's table for A100
# with 80 GB, the last two to the first four rows of torchtitan's (Llama 3 8B on 8 H100).
TRAFFIC_RATE = 0.45  # the reached part of the bandwidth, for traffic between products
COMPILED_TRAFFIC_RATE = 0.9  # torch.compile fuses half of the traffic away
FP8_RATE = 0.68  # relative to bf16's share of its own peak: casts and scales take the rest

# The part of a hidden collective's time that is still lost, an assumption: NCCL's kernels take
# bandwidth and multiprocessors, up to 32 of an A100's 108 or an H100's 132.
CONTENTION = 0.2
# The part of tensor parallelism's exchange that `parallel.async_tp` hides, less what it costs: with
# it, torchtitan's Llama 3.1 70B goes from 829 to 876 tokens/s (benchmarks/
# llama3_h100_202412_torchtitan.md, table 4), 5.4% of a step of which these formulas say that 17% is
# this exchange. That was in float8 on H100s, with torchtitan's code.
HIDDEN_BY_ASYNC_TP = 0.32
# Activations computed again are written and read once more; about half of a block's activations are
# results of products, which `selective` keeps.
_ACCESSES_AGAIN = {"none": 0, "selective": 1, "full": 2}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the device that has most to do.

    Attributes:
        products: Matrix products, including recomputed ones.
        attention: Attention, including recomputed attention.
        traffic: Traffic between the device and its memory, besides the products.
        network: Collectives that no computation hides.
        bubble: Waiting for the pipeline to fill and to drain.
        pcie: Transfer of weights, gradients and paged moments from the host's memory.
        memory: The name of the device's memory.
    """

    products: float
    attention: float
    traffic: float
    network: float
    bubble: float
    pcie: float = 0.0
    memory: str = "device-memory bandwidth"

    @property
    def total(self) -> float:
        """The sum of all parts, which run one after the other."""
        device = self.products + self.attention + self.traffic
        return device + self.network + self.bubble + self.pcie

    @property
    def resources(self) -> dict[str, float]:
        """Seconds by resource, named as in `roofs.Utilisation`; a bubble is no resource."""
        return {
            "compute": self.products + self.attention,
            self.memory: self.traffic,
            "PCIe": self.pcie,
            "network": self.network,
        }


def step_time(
    config: DecoderConfig, training: Training, hardware: Hardware, kernel: Kernel = FLASH_2
) -> StepTime:
    """Return the time of a step with this layout.

    Args:
        config: The model's shape.
        training: The layout and the micro-batches.
        hardware: The type of all devices.
        kernel: The attention kernel.

    Raises:
        UserError: The hardware's MFU is impossible.
    """
    trained = trainable(config, training)
    work = _work(config, training, trained)
    slowest = _imbalance(config, training)
    products = slowest * _products(config, training, hardware, trained)
    attention = slowest * _attention(config, training, hardware, kernel)
    moved = work.memory_bytes + _further_bytes(config, training)
    reached = COMPILED_TRAFFIC_RATE if training.compiled else TRAFFIC_RATE
    traffic = slowest * moved / hardware.memory_bandwidth / reached
    busy = products + attention + traffic
    backward = busy * 2 / 3
    sent = communication(config, training, hardware, trained)
    tensor = sent.tensor * (1 - HIDDEN_BY_ASYNC_TP if training.async_tp else 1)
    network = (
        tensor
        + sent.context
        + sent.experts
        + sent.pipeline
        + sent.optimizer
        + exposed(sent.weights, busy)
        + exposed(sent.gradients, backward)
        + exposed(sent.replicas, backward / training.micro_batches)
    )
    waits = bubble(training.schedule, training.layout.pp, training.micro_batches)
    pcie = hardware.pcie_bandwidth
    return StepTime(
        products=products,
        attention=attention,
        traffic=traffic,
        network=network,
        bubble=(busy + network) * waits / (1 - waits),
        pcie=0.0 if pcie is None else work.pcie_bytes / pcie,
        memory=hardware.memory_name,
    )


def exposed(collective: float, behind: float) -> float:
    """Return the seconds that a collective adds to the computation that runs beside it."""
    return max(0.0, collective - behind) + CONTENTION * min(collective, behind)


def bubble(schedule: Schedule, pp: int, micro_batches: int) -> float:
    """Return the share of a step in which a pipeline's process waits: (p - 1) / (v m + p - 1).

    Here v is the stages per process; zero-bubble schedules wait a third as long.
    """
    stages = stage_count(schedule, pp) // pp
    waiting = (pp - 1) / (3 if schedule == "zero_bubble" else 1)
    return waiting / (stages * micro_batches + waiting)


@cache
def product_rate(hardware: Hardware, precision: Precision) -> float:
    """Return the share of the peak that products reach if `REFERENCE` reaches `hardware.mfu`.

    Raises:
        UserError: The MFU is so high that no time is left to move activations.
    """
    mfu = hardware.mfu or ASSUMED_MFU
    share = Share(tokens=REFERENCE_TOKENS, length=REFERENCE_SEQUENCE, micro_batches=1, shards=8)
    traffic = step_work(REFERENCE, share, precision).memory_bytes / REFERENCE_TOKENS
    # Times are in seconds per token, times the peak.
    whole = flops_per_token(REFERENCE, REFERENCE_SEQUENCE) / mfu
    moving = traffic / hardware.memory_bandwidth / TRAFFIC_RATE * hardware.peak(precision)
    attention = attention_flops(REFERENCE, REFERENCE_SEQUENCE) / attention_share(
        REFERENCE_SEQUENCE, REFERENCE.head_width, hardware.attention, FLASH_1
    )
    products = flops_per_token(REFERENCE, 0)
    if moving + attention + products <= whole:
        return products / (whole - moving - attention)
    if hardware.mfu is None:
        return 1.0
    raise UserError(
        f"{hardware.name}: an MFU of {mfu:g} is more than attention and its memory's "
        f"{hardware.memory_bandwidth / 1e9:.0f} GB/s allow"
    )


def trainable(config: DecoderConfig, training: Training) -> float:
    """Return the fraction of the weights that has gradients: all, or only the adapters'."""
    if training.trains_all:
        return 1.0
    return adapter_parameters(config, training.adapter) / config.parameters


def _products(
    config: DecoderConfig, training: Training, hardware: Hardware, trained: float
) -> float:
    """Return the seconds of matrix products on one device, including recomputed ones."""
    precision = training.precision
    wide = _wide(training)
    rate = hardware.peak(wide) * product_rate(hardware, wide)
    narrow = rate * max(1.0, FP8_RATE * hardware.peak(precision) / hardware.peak(wide))
    whole = flops_per_token(config, 0, trained)
    head = whole * config.vocab_size * config.width / matrix_parameters(config)
    blocks = whole - head
    if training.activation_checkpoint == "full":
        # torch stops as soon as nothing is missing, before a block's last product.
        again = config.active_layer_parameters - config.hidden_per_token * config.width
        blocks += 2 * config.layers * again
    return (blocks / narrow + head / rate) * _share_of_tokens(training)


def _attention(
    config: DecoderConfig, training: Training, hardware: Hardware, kernel: Kernel
) -> float:
    """Return the seconds of attention, including recomputed; with float8 it is in bf16."""
    share = attention_share(training.sequence, config.head_width, hardware.attention, kernel)
    passes = 1 + (FORWARD_SHARE if training.activation_checkpoint == "full" else 0.0)
    seconds = attention_flops(config, training.sequence) / share / hardware.peak(_wide(training))
    return passes * seconds * _share_of_tokens(training)


def _wide(training: Training) -> Precision:
    """Return the precision in which attention and the head are computed."""
    return "bf16" if training.precision == "fp8" else training.precision


def _further_bytes(config: DecoderConfig, training: Training) -> float:
    """Return the memory traffic that `step_work` leaves out: recomputed and gathered activations.

    Tensor-parallel processes hold the inputs of products, and the tensors they add up, undivided.
    """
    layout, blocks = training.layout, activations_per_token(config) - config.vocab_size
    again = _ACCESSES_AGAIN[training.activation_checkpoint] * blocks / layout.tp
    gathered = 4 * config.layers * config.width * (1 - 1 / layout.tp) * ACTIVATION_ACCESSES
    numbers = (again + gathered) * _tokens(training) / layout.pp
    return numbers * training.compute_bytes


def _share_of_tokens(training: Training) -> float:
    """Return how many of a step's tokens one process would compute if it had the whole model."""
    return _tokens(training) / (training.layout.tp * training.layout.pp)


def _work(config: DecoderConfig, training: Training, trained: float) -> Work:
    """Return the work of one device in a step."""
    layout = training.layout
    quantised = training.adapter.kind == "qlora"
    share = Share(
        tokens=int(_tokens(training) * layout.dp_cp),
        length=training.sequence,
        micro_batches=training.micro_batches,
        model=layout.tp * layout.pp,
        data=layout.dp_cp,
        shards=training.shards,
        trainable=trained,
        # A weight decoded from NF4 is written in the products' dtype, then read.
        frozen_bytes=NF4 + 2 * training.compute_bytes if quantised else training.compute_bytes,
        offloaded=training.cpu_offload,
        paged=training.paged_moments,
        ep=training.ep,
    )
    return step_work(config, share, training.precision)


def _tokens(training: Training) -> float:
    """Return the tokens of a step on one process."""
    whole = training.micro_batch * training.micro_batches * training.sequence
    return whole / training.layout.cp


def _imbalance(config: DecoderConfig, training: Training) -> float:
    """Return the slowest pipeline process's load over the mean; the head counts like layers."""
    loads: list[float] = [*layers_by_rank(config, training)]
    loads[-1] += config.vocab_size * config.width / config.active_layer_parameters
    return max(loads) * len(loads) / sum(loads)
