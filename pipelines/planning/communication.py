"""Seconds that a step's collectives take on the links, by formula; no torch here.

Rings send (n - 1) / n of what they gather or scatter, and all-reduce twice that. A ring over
several nodes goes in and out of each node once for each of its devices there, so it has as many of
the node's network ports: data parallelism over whole nodes has all of them, and beside 8-way tensor
parallelism one. An all-to-all has no such luck: each device sends through its own port.

Sources: Patarasuk and Yuan 2009 (rings); Rajbhandari et al. 2020 (ZeRO), section 7; Korthikanti et
al. 2022 (tensor and sequence parallelism); Jacobs et al. 2023 (DeepSpeed Ulysses), section 3.
"""

from dataclasses import dataclass

from pipelines.models.config import DecoderConfig
from pipelines.parallel.layout import stage_count
from pipelines.planning.hardware import Hardware
from pipelines.planning.memory_state import NF4
from pipelines.planning.memory_training import FP32, Training

REACHED = (
    0.8  # of a link's datasheet: 370 of 450 GB/s, by NCCL's maintainer (nccl-tests, issue 212)
)


@dataclass(frozen=True)
class Group:
    """Processes that exchange data, and how they lie over nodes.

    Attributes:
        size: How many.
        within: How many of them one node has.
    """

    size: int
    within: int

    @classmethod
    def of(cls, size: int, stride: int, devices_per_node: int) -> "Group":
        """Make a group of ranks that are `stride` apart, where a node has neighbours."""
        return cls(size, max(1, min(size, devices_per_node // stride)))

    def ring(self, hardware: Hardware) -> float:
        """Bytes a second through each process of a ring."""
        if self.within == self.size:
            return hardware.link_bandwidth * REACHED
        ports = hardware.network_bandwidth * self.within
        return min(hardware.link_bandwidth, ports) * REACHED

    def port(self, hardware: Hardware) -> float:
        """Bytes a second from each process to all others at once."""
        whole = self.within == self.size
        return (hardware.link_bandwidth if whole else hardware.network_bandwidth) * REACHED

    def gather(self, size: float, hardware: Hardware) -> float:
        """Seconds to give every process `size` bytes of which each has its part, or to scatter."""
        return size * (self.size - 1) / self.size / self.ring(hardware)

    def all_reduce(self, size: float, hardware: Hardware) -> float:
        """Seconds to add up `size` bytes of each process."""
        return 2 * self.gather(size, hardware)

    def all_to_all(self, size: float, hardware: Hardware) -> float:
        """Seconds in which each process sends its `size` bytes, a part to each."""
        return size * (self.size - 1) / self.size / self.port(hardware)


@dataclass(frozen=True)
class Communication:
    """Seconds of one step, on one device, as if nothing hid them.

    Attributes:
        weights: FSDP's gathers, of all micro-batches; computation hides them where it is longer.
        gradients: Divided among shards, behind every backward pass.
        replicas: Gradients added up once a step, behind the last backward pass.
        tensor: Of tensor parallelism, which nothing hides.
        context: Of context parallelism likewise.
        pipeline: Activations and their gradients between stages.
    """

    weights: float
    gradients: float
    replicas: float
    tensor: float
    context: float
    pipeline: float


def communication(
    config: DecoderConfig, training: Training, hardware: Hardware, trained: float
) -> Communication:
    """What a step sends.

    Args:
        config: The model's shape.
        training: How it is laid out, and its micro-batches.
        hardware: Whose links they are.
        trained: The part of the weights that has gradients.
    """
    layout, number = training.layout, training.micro_batches
    tokens = training.micro_batch * training.sequence / layout.cp
    stream = tokens * config.width * training.compute_bytes  # the residual stream, whole
    layers = config.layers / layout.pp
    # Sums over processes are kept where products are; what is gathered is gathered again. A block
    # that is computed again is so up to its last product, whose sum is spared.
    sums = {"none": 4.0, "selective": 5.0, "full": 5.5}[training.activation_checkpoint]
    exchanges = {"none": 2, "selective": 2, "full": 3}[training.activation_checkpoint]
    weights, gradients, replicas = _data_parallel(config, training, hardware, trained)
    tp = Group.of(layout.tp, 1, hardware.devices_per_node)
    cp = Group.of(layout.cp, layout.tp, hardware.devices_per_node)
    heads = 2 * (config.heads + max(config.kv_heads, layout.cp)) * config.head_width / layout.tp
    exchanged = layers * exchanges * tokens * heads * training.compute_bytes
    return Communication(
        weights=number * weights,
        gradients=number * gradients,
        replicas=replicas,
        # In attention and feed-forward layers, forward and backward; then embeddings and head.
        tensor=number * (layers * sums + 2) * tp.all_reduce(stream, hardware),
        context=number * cp.all_to_all(exchanged, hardware),
        pipeline=_pipeline(training, hardware, stream),
    )


def _data_parallel(
    config: DecoderConfig, training: Training, hardware: Hardware, trained: float
) -> tuple[float, float, float]:
    """Seconds of gathering weights and dividing gradients in a micro-batch, and of adding up."""
    layout, per_node = training.layout, hardware.devices_per_node
    held = config.parameters / layout.tp / layout.pp
    gradients = held * trained * FP32
    if not training.is_fully_sharded:
        every = Group.of(layout.dp_cp, layout.tp, per_node)
        # ZeRO's first stage gives out the updated weights beside.
        parts = 3 if training.sharding == "optimizer" else 2
        return 0.0, 0.0, parts * every.gather(gradients, hardware)
    frozen = NF4 if training.adapter.kind == "qlora" else training.compute_bytes
    whole = held * (trained * training.compute_bytes + (1 - trained) * frozen)
    shards = Group.of(training.shards, layout.tp, per_node)
    gathers = 2 if training.gives_up_blocks else 1
    divided, added = shards.gather(gradients, hardware), 0.0
    replicas = layout.dp_cp // training.shards
    if replicas > 1:
        copies = Group.of(replicas, layout.tp * training.shards, per_node)
        # Every process of a node has another shard, and its own port for it.
        added = copies.all_reduce(gradients / training.shards, hardware)
    if training.whole_gradients_wait:
        divided, added = 0.0, divided + added
    return gathers * shards.gather(whole, hardware), divided, added


def _pipeline(training: Training, hardware: Hardware, stream: float) -> float:
    """Seconds in which a process sends what its stages made, forward and backward."""
    layout = training.layout
    if layout.pp == 1:
        return 0.0
    beside = layout.world // layout.pp
    near = beside < hardware.devices_per_node
    link = hardware.link_bandwidth if near else hardware.network_bandwidth
    hops = 2 * stage_count(training.schedule, layout.pp) / layout.pp
    return training.micro_batches * hops * stream / layout.tp / (link * REACHED)
