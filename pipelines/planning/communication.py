"""Formulas for the seconds that a step's collectives take on the links; no torch here.

A ring sends (n - 1) / n of the data that it gathers or scatters, and an all-reduce twice that. A
ring over several nodes can use one network port of a node for each of its devices there: data
parallelism over whole nodes uses all ports, and beside 8-way tensor parallelism it uses one. In an
all-to-all, each device sends through its own port only.

Sources: Patarasuk and Yuan 2009 (rings); Rajbhandari et al. 2020 (ZeRO), section 7; Korthikanti et
al. 2022 (tensor and sequence parallelism); Jacobs et al. 2023 (DeepSpeed Ulysses), section 3.
"""

import math
from dataclasses import dataclass

from pipelines.models.config import DecoderConfig
from pipelines.parallel.layout import stage_count
from pipelines.planning.hardware import Hardware
from pipelines.planning.memory_state import NF4, adapter_parameters, muon_batches
from pipelines.planning.memory_training import BF16, FP32, Training, gathered_bytes

# The reached part of a link's datasheet rate: NCCL's maintainer reports 370 of 450 GB/s
# (nccl-tests, issue 212).
REACHED = 0.8


@dataclass(frozen=True)
class Group:
    """Processes that exchange data, and how they are spread over nodes.

    Attributes:
        size: The number of processes.
        within: How many of them are on one node.
    """

    size: int
    within: int

    @classmethod
    def of(cls, size: int, stride: int, devices_per_node: int) -> "Group":
        """Make a group of ranks that are `stride` apart; a node holds consecutive ranks."""
        return cls(size, max(1, min(size, devices_per_node // stride)))

    def ring(self, hardware: Hardware) -> float:
        """Return the bytes per second through each process of a ring."""
        if self.within == self.size:
            return hardware.link_bandwidth * REACHED
        ports = hardware.network_bandwidth * self.within
        return min(hardware.link_bandwidth, ports) * REACHED

    def port(self, hardware: Hardware) -> float:
        """Return the bytes per second from each process when it sends to all others at once."""
        whole = self.within == self.size
        return (hardware.link_bandwidth if whole else hardware.network_bandwidth) * REACHED

    def gather(self, size: float, hardware: Hardware) -> float:
        """Return the seconds to gather `size` bytes from all processes, or to scatter them."""
        return size * (self.size - 1) / self.size / self.ring(hardware)

    def all_reduce(self, size: float, hardware: Hardware) -> float:
        """Return the seconds to add up `size` bytes of each process."""
        return 2 * self.gather(size, hardware)

    def all_to_all(self, size: float, hardware: Hardware) -> float:
        """Return the seconds in which each process sends an equal part of `size` bytes to each."""
        return size * (self.size - 1) / self.size / self.port(hardware)


@dataclass(frozen=True)
class Communication:
    """Seconds of communication of one step on one device, as if no computation hid them.

    Attributes:
        weights: FSDP's gathers for all micro-batches; computation that takes longer hides them.
        gradients: Scattering gradients to shards, which overlaps with every backward pass.
        replicas: Adding up gradients once per step, which overlaps with the last backward pass.
        optimizer: Muon's results, of which each replica computes a part.
        tensor: Tensor parallelism, which no computation hides without `parallel.async_tp`.
        context: Context parallelism, which no computation hides.
        experts: Tokens on their way to experts and back, which no computation hides.
        pipeline: Sending activations and their gradients between stages.
    """

    weights: float
    gradients: float
    replicas: float
    optimizer: float
    tensor: float
    context: float
    experts: float
    pipeline: float


def communication(
    config: DecoderConfig, training: Training, hardware: Hardware, trained: float
) -> Communication:
    """Return the seconds that a step's communication takes.

    Args:
        config: The model's shape.
        training: The layout and the micro-batches.
        hardware: The devices, with the rates of their links.
        trained: The fraction of the weights that has gradients.
    """
    layout, number = training.layout, training.micro_batches
    tokens = training.micro_batch * training.sequence / layout.cp
    stream = tokens * config.width * training.compute_bytes  # the residual stream, whole
    layers = config.layers / layout.pp
    # Selective checkpointing keeps products and their sums over processes, but gathers again. Full
    # checkpointing computes a block again up to its last product, and skips that product's sum.
    sums = {"none": 4.0, "selective": 5.0, "full": 5.5}[training.activation_checkpoint]
    exchanges = {"none": 2, "selective": 2, "full": 3}[training.activation_checkpoint]
    weights, gradients, replicas = _data_parallel(config, training, hardware, trained)
    tp = Group.of(layout.tp, 1, hardware.devices_per_node)
    cp = Group.of(layout.cp, layout.tp, hardware.devices_per_node)
    heads = 2 * (config.heads + max(config.kv_heads, layout.cp)) * config.head_width
    # Shared experts read and write the stream beside those that are chosen.
    dense = config.first_k_dense_replace / config.layers
    sums += sums / 2 * (1 - dense) if config.n_shared_experts else 0
    if config.kv_lora_rank:  # latents' gradients are added up, and not the stream's after them
        sums += (config.latents + config.rotary_width) / config.width - bool(config.q_lora_rank) / 2
        widths = config.head_width + config.qk_nope_head_dim + 2 * config.value_width
        heads = config.heads * widths + layout.cp * layout.tp * config.rotary_width
    exchanged = layers * exchanges * tokens * heads / layout.tp * training.compute_bytes
    return Communication(
        weights=weights,
        gradients=number * gradients,
        replicas=replicas,
        optimizer=_muon(config, training, hardware),
        # Sums in attention and feed-forward layers, both passes; then embeddings and head.
        tensor=number * (layers * sums + 2) * tp.all_reduce(stream, hardware),
        context=number * cp.all_to_all(exchanged, hardware),
        experts=number * layers * _to_experts(config, training, hardware, tokens),
        pipeline=_pipeline(training, hardware, stream),
    )


def _to_experts(
    config: DecoderConfig, training: Training, hardware: Hardware, tokens: float
) -> float:
    """Return the seconds of a layer in which tokens travel, in both passes.

    Experts are taken to have equally many. Each tensor parallel process sends whole tokens.
    """
    group = Group.of(training.ep, training.layout.tp, hardware.devices_per_node)
    # There and back in each pass; full checkpointing goes there again.
    times = 5 if training.activation_checkpoint == "full" else 4
    routed = tokens * config.experts_per_token * config.width * training.compute_bytes
    return times * group.all_to_all(routed, hardware)


def _data_parallel(
    config: DecoderConfig, training: Training, hardware: Hardware, trained: float
) -> tuple[float, float, float]:
    """Return the seconds to gather a step's weights, to scatter and to add up gradients."""
    layout, per_node = training.layout, hardware.devices_per_node
    parameters = config.parameters
    if config.tie_embeddings and layout.pp > 1:  # a pipeline's first and last process have them
        parameters += config.vocab_size * config.width
    held = parameters / layout.tp / layout.pp
    gradients = held * trained * training.reduce_bytes
    if not training.is_fully_sharded:
        every = Group.of(layout.dp_cp, layout.tp, per_node)
        # ZeRO's first stage also sends out the updated weights.
        updated = held * trained * FP32 if training.sharding == "optimizer" else 0.0
        return 0.0, 0.0, every.gather(2 * gradients + updated, hardware)
    shards = Group.of(training.shards, layout.tp, per_node)
    blocks = config.layers * config.layer_parameters / parameters
    size = gathered_bytes(config, training)
    gathered = held * _gathered(training, trained, blocks, size)
    divided, added = shards.gather(gradients, hardware), 0.0
    weights = shards.gather(gathered, hardware)
    if training.ep > 1:  # processes with the same experts exchange these, and each only its own
        alike = Group.of(training.shards // training.ep, layout.tp * training.ep, per_node)
        part = config.layers * config.expert_parameters / parameters
        theirs = part * held * _gathered(training, trained, 1.0, size)
        if not training.trains_all:
            of_experts = adapter_parameters(config, training.adapter, of_experts=True)
            part = of_experts / adapter_parameters(config, training.adapter)
        of_theirs = part * gradients
        weights += alike.gather(theirs / training.ep, hardware) - shards.gather(theirs, hardware)
        divided += alike.gather(of_theirs / training.ep, hardware)
        divided -= shards.gather(of_theirs, hardware)
    replicas = layout.dp_cp // training.shards
    if replicas > 1:
        copies = Group.of(replicas, layout.tp * training.shards, per_node)
        # Every process of a node has a different shard, and its own port for it.
        added = copies.all_reduce(gradients / training.shards, hardware)
    if training.whole_gradients_wait:
        divided, added = 0.0, divided + added
    return weights, divided, added


def _muon(config: DecoderConfig, training: Training, hardware: Hardware) -> float:
    """Return the seconds to gather what each replica orthogonalised, in bf16."""
    layout = training.layout
    copies = Group.of(
        layout.dp_replicate,
        layout.world // layout.pp // layout.dp_replicate,
        hardware.devices_per_node,
    )
    shares = [
        (math.ceil(matrices / copies.size), numbers)
        for matrices, numbers in muon_batches(config, training)
        if matrices >= copies.size > 1
    ]
    gathered = sum(share * copies.size * numbers * BF16 for share, numbers in shares)
    return copies.gather(gathered, hardware)


def _gathered(training: Training, trained: float, blocks: float, size: int) -> float:
    """Return the bytes that a step gathers for each weight, of which `blocks` is the blocks' part.

    A number of a block has `size` bytes. Each pass gathers the blocks; the root stays gathered for
    both. A pipeline's stage keeps the root, and its blocks from a backward pass to the next
    forward.
    """
    number = training.micro_batches
    of_root, of_blocks = (number, 2 * number) if training.layout.pp == 1 else (1, number + 1)
    if not training.gives_up_blocks:
        of_blocks = of_root
    root = training.compute_bytes
    frozen = NF4 / training.compute_bytes if training.adapter.kind == "qlora" else 1
    unfrozen = (1 - blocks) * of_root * root + blocks * of_blocks * size
    return unfrozen * (trained + (1 - trained) * frozen)


def _pipeline(training: Training, hardware: Hardware, stream: float) -> float:
    """Return the seconds in which a process sends its stages' outputs in both passes."""
    layout = training.layout
    if layout.pp == 1:
        return 0.0
    beside = layout.world // layout.pp
    near = beside < hardware.devices_per_node
    link = hardware.link_bandwidth if near else hardware.network_bandwidth
    hops = 2 * stage_count(training.schedule, layout.pp) / layout.pp
    return training.micro_batches * hops * stream / layout.tp / (link * REACHED)
