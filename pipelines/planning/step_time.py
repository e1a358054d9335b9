"""How long an optimizer step takes, by formula; no torch here.

A device multiplies at a share of its peak, attends at the rate of the kernel, moves
what lies between, and waits: for collectives that nothing hides, and for a pipeline to fill and to
drain. The share of the peak comes from one figure of the device, its published MFU on
`REFERENCE`, and is the same for every model and layout. How near that comes to tables that others
measured, and where it does not, is in `tests/unit/planning/test_published_time.py`.

Sources: Narayanan et al. 2021 (bubbles of 1F1B and interleaved stages); Qi et al. 2023 (zero
bubble, section 2: a third of 1F1B's); Korthikanti et al. 2022 (recomputation).

How fast attention is on a device, from its kernels' own published figures; no torch here.

Attention's rate is another than that of matrix products: it grows with the sample, and on an H100
FlashAttention 2 reaches a third of the peak where products reach two. The figures count what is
done: half of the scores, as the others are in the future, and in the backward pass 2.5 times as
many operations as in the forward pass, since scores are computed anew.

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
from pipelines.planning.hardware import AttentionFigures, Hardware, Precision
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

Kernel = Literal["flash-1", "flash-2"]
FLASH_1: Kernel = "flash-1"  # with which the tables were measured that MFUs are from
FLASH_2: Kernel = "flash-2"  # which torch has

FORWARD_SHARE = 1 / 3.5  # of both passes' operations: one of 1 + 2.5

_SHORTEST = 512
# TFLOP/s with samples of 512, 1k, 2k, 4k, 8k and 16k tokens, by width of a head. FlashAttention 1
# on an A100 is the one written in Triton; for an H100 there is only the one in CUDA.
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
# The Triton kernel that LLM Foundry pinned is later than the one in the figures. Fitted on its
# rows of A100 with 80 GB.
_PINNED = 1.2


def attention_flops(config: DecoderConfig, length: int) -> float:
    """Operations a token in both passes, as the figures count them; windows are not cut."""
    forward = 4 * config.layers * length * config.heads * config.head_width / 2
    return forward / FORWARD_SHARE


def attention_share(
    length: int, head_width: int, figures: AttentionFigures, kernel: Kernel = FLASH_2
) -> float:
    """The part of a device's peak in half precision that `attention_flops` run at.

    Args:
        length: Of a sample, in tokens; longer ones than were measured are as fast as the longest.
        head_width: Of one head.
        figures: Whose: the device's own, or those of the one that it resembles.
        kernel: That computes it.
    """
    rates = _FIGURES[kernel][figures][64 if head_width < 96 else 128]
    at = min(max(0.0, math.log2(length / _SHORTEST)), len(rates) - 1)
    below = min(int(at), len(rates) - 2)
    rate = rates[below] + (at - below) * (rates[below + 1] - rates[below])
    return rate * (_PINNED if kernel == FLASH_1 else 1.0) / _PEAKS[figures]


# What `Hardware.mfu` says of a device is taken as measured on this: 3B, samples of 2048 tokens,
# nothing computed again, one node. It is LLM Foundry's MPT-3B, the middle of its tables.
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
REFERENCE_TOKENS = 6 * REFERENCE_SEQUENCE  # of a micro-batch

# Where no MFU is published: the middle of those that are, 0.30 (V100) to 0.57 (A100).
ASSUMED_MFU = 0.4

# Fitted, and alike on every device. The first so that the rows of LLM Foundry's table for A100
# with 80 GB come out, the last two by the first four rows of torchtitan's (Llama 3 8B on 8 H100).
TRAFFIC_RATE = 0.45  # of the bandwidth, for what lies between products
COMPILED_TRAFFIC_RATE = 0.9  # torch.compile fuses half of the traffic away
FP8_RATE = 0.68  # beside bf16's share of its own peak: casts and scales take the rest

# Of a hidden collective's time that is lost all the same: NCCL's kernels take multiprocessors, up
# to 32 of an A100's 108 or an H100's 132, and bandwidth. An assumption.
CONTENTION = 0.2
# What is computed again is written and read once more; of a block's activations about half are the
# results of products, which `selective` keeps.
_ACCESSES_AGAIN = {"none": 0, "selective": 1, "full": 2}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the device that has most to do.

    Attributes:
        products: Matrix products, those computed again too.
        attention: Likewise.
        traffic: Between the device and its memory, beside the products.
        network: Collectives that nothing hides.
        bubble: Waiting for the pipeline to fill and to drain.
        pcie: Weights and gradients that come from the host's memory.
        memory: What the device's memory is called.
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
        """All of it, one after the other."""
        device = self.products + self.attention + self.traffic
        return device + self.network + self.bubble + self.pcie

    @property
    def resources(self) -> dict[str, float]:
        """Seconds by resource, under the names of `roofs.Utilisation`; a bubble is none."""
        return {
            "compute": self.products + self.attention,
            self.memory: self.traffic,
            "PCIe": self.pcie,
            "network": self.network,
        }


def step_time(
    config: DecoderConfig, training: Training, hardware: Hardware, kernel: Kernel = FLASH_2
) -> StepTime:
    """What a step of this layout takes.

    Args:
        config: The model's shape.
        training: How it is laid out, and its micro-batches.
        hardware: Of every device.
        kernel: Of attention.

    Raises:
        UserError: the hardware's MFU can't be.
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
    network = (
        sent.tensor
        + sent.context
        + sent.pipeline
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
    """Seconds that a collective adds to the computation that runs beside it."""
    return max(0.0, collective - behind) + CONTENTION * min(collective, behind)


def bubble(schedule: Schedule, pp: int, micro_batches: int) -> float:
    """The share of a step in which a pipeline's process waits: (p - 1) / (v m + p - 1).

    With v stages a process; zero-bubble schedules wait a third as long.
    """
    stages = stage_count(schedule, pp) // pp
    waiting = (pp - 1) / (3 if schedule == "zero_bubble" else 1)
    return waiting / (stages * micro_batches + waiting)


@cache
def product_rate(hardware: Hardware, precision: Precision) -> float:
    """The share of the peak that products reach, so that `REFERENCE` reaches `hardware.mfu`.

    Raises:
        UserError: the MFU is so high that no time is left to move activations.
    """
    mfu = hardware.mfu or ASSUMED_MFU
    share = Share(tokens=REFERENCE_TOKENS, length=REFERENCE_SEQUENCE, micro_batches=1, shards=8)
    traffic = step_work(REFERENCE, share, precision).memory_bytes / REFERENCE_TOKENS
    # In seconds of a token, times the peak.
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
    """The part of the weights that has gradients: all of them, or adapters' alone."""
    if training.trains_all:
        return 1.0
    return adapter_parameters(config, training.adapter) / config.parameters


def _products(
    config: DecoderConfig, training: Training, hardware: Hardware, trained: float
) -> float:
    """Seconds of matrix products on one device, those computed again too."""
    precision: Precision = training.precision  # type: ignore[assignment]  # a recipe's own
    wide = _wide(training)
    rate = hardware.peak(wide) * product_rate(hardware, wide)
    narrow = rate * max(1.0, FP8_RATE * hardware.peak(precision) / hardware.peak(wide))
    whole = flops_per_token(config, 0, trained)
    head = whole * config.vocab_size * config.width / matrix_parameters(config)
    blocks = whole - head
    if training.activation_checkpoint == "full":
        # torch stops where nothing is missing any more, before a block's last product.
        again = config.layer_parameters - config.hidden * config.width
        blocks += 2 * config.layers * again
    return (blocks / narrow + head / rate) * _share_of_tokens(training)


def _attention(
    config: DecoderConfig, training: Training, hardware: Hardware, kernel: Kernel
) -> float:
    """Seconds of attention likewise; with float8 it is in bf16."""
    share = attention_share(training.sequence, config.head_width, hardware.attention, kernel)
    passes = 1 + (FORWARD_SHARE if training.activation_checkpoint == "full" else 0.0)
    seconds = attention_flops(config, training.sequence) / share / hardware.peak(_wide(training))
    return passes * seconds * _share_of_tokens(training)


def _wide(training: Training) -> Precision:
    """Return the precision in which attention and the head are computed."""
    return "bf16" if training.precision == "fp8" else training.precision  # type: ignore[return-value]


def _further_bytes(config: DecoderConfig, training: Training) -> float:
    """Between device and memory, beside what `step_work` counts: computed again, or gathered.

    Tensor parallel processes have what their products read, and what they add up, whole.
    """
    layout, blocks = training.layout, activations_per_token(config) - config.vocab_size
    again = _ACCESSES_AGAIN[training.activation_checkpoint] * blocks / layout.tp
    gathered = 4 * config.layers * config.width * (1 - 1 / layout.tp) * ACTIVATION_ACCESSES
    numbers = (again + gathered) * _tokens(training) / layout.pp
    return numbers * training.compute_bytes


def _share_of_tokens(training: Training) -> float:
    """What one process computes of a step's tokens, as if it had the whole model."""
    return _tokens(training) / (training.layout.tp * training.layout.pp)


def _work(config: DecoderConfig, training: Training, trained: float) -> Work:
    """A step of one device against memory and PCIe."""
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
        # From NF4 the weight is written in the type of the products, then read.
        frozen_bytes=NF4 + 2 * training.compute_bytes if quantised else training.compute_bytes,
        offloaded=training.cpu_offload,
    )
    return step_work(config, share, training.precision)  # type: ignore[arg-type]


def _tokens(training: Training) -> float:
    """Return the tokens of a step on one process."""
    whole = training.micro_batch * training.micro_batches * training.sequence
    return whole / training.layout.cp


def _imbalance(config: DecoderConfig, training: Training) -> float:
    """What the slowest process of a pipeline has over the mean; the head counts as layers do."""
    loads: list[float] = [*layers_by_rank(config, training)]
    loads[-1] += config.vocab_size * config.width / config.layer_parameters
    return max(loads) * len(loads) / sum(loads)
