"""How long an optimizer step takes, by formula; no torch here.

A device multiplies at a share of its peak, moves what lies between the products, and waits: for
collectives that nothing hides, and for a pipeline to fill and to drain. The share of the peak comes
from one figure of the device, its published MFU on `REFERENCE`, and is the same for every model,
layout and length. How near that comes to tables that others measured, and where it does not, is in
`tests/unit/planning/test_published_time.py`.

Sources: Narayanan et al. 2021 (bubbles of 1F1B and interleaved stages); Qi et al. 2023 (zero
bubble, section 2: a third of 1F1B's); Korthikanti et al. 2022 (recomputation).
"""

from dataclasses import dataclass
from functools import cache

from pipelines.core.errors import UserError
from pipelines.distributed.stages import Schedule, stage_count
from pipelines.models.config import DecoderConfig
from pipelines.planning.communication import communication
from pipelines.planning.hardware import Hardware, Precision
from pipelines.planning.memory_state import NF4, adapter_parameters
from pipelines.planning.memory_training import Training, layers_by_rank
from pipelines.planning.roofs import (
    Share,
    Work,
    flops_per_token,
    matrix_parameters,
    step_work,
)

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

# Figures of kernels, alike on every device. The first five are set so that most rows of LLM
# Foundry's tables (A100 of 40 and 80 GB, H100) come out, the last two by one row each of
# torchtitan's (Llama 3 8B on 8 H100, with torch.compile and with float8).
ATTENTION_RATE = 0.65  # beside other products; the half that causality spares counts as done
TRAFFIC_RATE = 0.5  # of the bandwidth, for what lies between products
CONTENTION = 0.2  # of a hidden collective's time is lost all the same: it takes cores and memory
SELECTIVE_TRAFFIC = 1.1  # norms and activation functions come again, whose accesses are a few
AGAIN = 0.7  # of a third of the products' time: those of a forward pass are the faster ones
COMPILED_TRAFFIC_RATE = 1.0  # torch.compile fuses half of the traffic away
FP8_RATE = 0.78  # beside bf16's share of its own peak: casts and scales take the rest


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the device that has most to do.

    Attributes:
        products: Matrix products and attention, those computed again too.
        traffic: Between the device and its memory, beside the products.
        network: Collectives that nothing hides.
        bubble: Waiting for the pipeline to fill and to drain.
        pcie: Weights and gradients that come from the host's memory.
        memory: What the device's memory is called.
    """

    products: float
    traffic: float
    network: float
    bubble: float
    pcie: float = 0.0
    memory: str = "device-memory bandwidth"

    @property
    def total(self) -> float:
        """All of it, one after the other."""
        return self.products + self.traffic + self.network + self.bubble + self.pcie

    @property
    def resources(self) -> dict[str, float]:
        """Seconds by resource, under the names of `roofs.Utilisation`; a bubble is none."""
        return {
            "compute": self.products,
            self.memory: self.traffic,
            "PCIe": self.pcie,
            "network": self.network,
        }


def step_time(config: DecoderConfig, training: Training, hardware: Hardware) -> StepTime:
    """What a step of this layout takes.

    Args:
        config: The model's shape.
        training: How it is laid out, and its micro-batches.
        hardware: Of every device.

    Raises:
        UserError: the hardware's MFU can't be.
    """
    trained = trainable(config, training)
    work = _work(config, training, trained)
    slowest = _imbalance(config, training)
    seconds = slowest * _products(config, training, hardware, trained)
    reached = COMPILED_TRAFFIC_RATE if training.compiled else TRAFFIC_RATE
    traffic = slowest * work.memory_bytes / hardware.memory_bandwidth / reached
    if training.activation_checkpoint == "selective":
        traffic *= SELECTIVE_TRAFFIC
    sent = communication(config, training, hardware, trained)
    busy = seconds + traffic
    backward = busy * 2 / 3
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
        products=seconds,
        traffic=traffic,
        network=network,
        bubble=(busy + network) * waits / (1 - waits),
        pcie=0.0 if pcie is None else work.pcie_bytes / pcie,
        memory="CPU memory" if pcie is None else "device-memory bandwidth",
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
    flops = flops_per_token(REFERENCE, REFERENCE_SEQUENCE)
    attention = flops - flops_per_token(REFERENCE, 0)
    share = Share(tokens=REFERENCE_TOKENS, length=REFERENCE_SEQUENCE, micro_batches=1, shards=8)
    traffic = step_work(REFERENCE, share, precision).memory_bytes / REFERENCE_TOKENS
    # In seconds that the peak would take; the traffic goes on at its own rate.
    whole = flops / mfu
    moving = traffic / hardware.memory_bandwidth / TRAFFIC_RATE * hardware.peak(precision)
    if moving >= whole:
        raise UserError(
            f"{hardware.name}: an MFU of {mfu:g} is more than its memory's "
            f"{hardware.memory_bandwidth / 1e9:.0f} GB/s allow"
        )
    return (flops - attention + attention / ATTENTION_RATE) / (whole - moving)


def trainable(config: DecoderConfig, training: Training) -> float:
    """The part of the weights that has gradients: all of them, or adapters' alone."""
    if training.trains_all:
        return 1.0
    return adapter_parameters(config, training.adapter) / config.parameters


def _products(
    config: DecoderConfig, training: Training, hardware: Hardware, trained: float
) -> float:
    """Seconds of matrix products and attention on one device, those computed again too."""
    precision: Precision = training.precision  # type: ignore[assignment]  # a recipe's own
    wide: Precision = "bf16" if precision == "fp8" else precision  # of attention and head
    rate = hardware.peak(wide) * product_rate(hardware, wide)
    narrow = rate * max(1.0, FP8_RATE * hardware.peak(precision) / hardware.peak(wide))
    whole = flops_per_token(config, 0, trained)
    head = whole * config.vocab_size * config.width / matrix_parameters(config)
    attention = flops_per_token(config, training.sequence, trained) - whole
    blocks = whole - head
    if training.activation_checkpoint == "full":
        blocks += AGAIN * 2 * config.layers * config.layer_parameters
        attention *= 1 + AGAIN / 3
    seconds = blocks / narrow + head / rate + attention / (rate * ATTENTION_RATE)
    return seconds * _tokens(training) / (training.layout.tp * training.layout.pp)


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
    """Of a step on one process."""
    whole = training.micro_batch * training.micro_batches * training.sequence
    return whole / training.layout.cp


def _imbalance(config: DecoderConfig, training: Training) -> float:
    """What the slowest process of a pipeline has over the mean; the head counts as layers do."""
    loads: list[float] = [*layers_by_rank(config, training)]
    loads[-1] += config.vocab_size * config.width / config.layer_parameters
    return max(loads) * len(loads) / sum(loads)
