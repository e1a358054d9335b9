"""Formulas for the devices, users, speed, memory and cost of serving a model; no torch here.

Speeds are bounds, as in the roofline model (Williams et al. 2009), and not forecasts: a token for
every sequence takes one reading of all weights and of all keys and values, or their FLOPs at the
device's peak, whichever is longer (Pope et al. 2022, "Efficiently Scaling Transformer Inference",
section 2). Communication between devices and gaps between kernels are not included.

Costs are given for rented and for owned devices.

The memory is that of the weights as stored in files, of keys and values of all sequences answered
at once, and of the activations of the largest step, a piece of a prompt. Losses of the allocator
and the engine are not included: see `HEADROOM` in `memory.py`.
"""

from dataclasses import dataclass
from typing import Literal

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.parallel.division import linear_shapes
from pipelines.planning.hardware import Hardware
from pipelines.planning.memory import HEADROOM
from pipelines.planning.memory_training import BF16, FP32
from pipelines.planning.roofs import matrix_parameters

_HOURS_A_MONTH = 365.25 * 24 / 12
_MONTHS_A_YEAR = 12
_MILLION = 1e6


@dataclass(frozen=True)
class Owned:
    """The cost of an owned device; the owner must give the first two figures.

    Attributes:
        price: US dollars for a device, with its share of the machine and its network.
        kwh_price: US dollars per kWh.
        years: The number of years over which the price is written off.
        overhead: Power of the site and of the machine over that of the devices (PUE). 1.56 is the
            mean of Uptime Institute's survey of 2024.
        rack_kw_month: US dollars per month of rack space for each kW that a device draws. 184 is
            the mean asking rent of 250 to 500 kW in CBRE's North America Data Center Trends of
            the second half of 2024.
    """

    price: float
    kwh_price: float
    years: float = 4.0
    overhead: float = 1.56
    rack_kw_month: float = 184.0

    def month(self, hardware: Hardware) -> float:
        """Return the US dollars per month for one device at full load."""
        kw = hardware.watts / 1000
        power = kw * self.overhead * self.kwh_price * _HOURS_A_MONTH
        return self.price / (self.years * _MONTHS_A_YEAR) + power + kw * self.rack_kw_month


@dataclass(frozen=True)
class Costs:
    """US dollars for one replica that runs all the time.

    Attributes:
        instance_month: The cost per month.
        user_month: The cost per month and sequence answered at once.
        million_tokens: The cost of a million tokens of answers at full load.
    """

    instance_month: float
    user_month: float
    million_tokens: float


def rented_month(hardware: Hardware, hourly_price: float | None) -> float | None:
    """Return the US dollars per month for one device; None if no price is known."""
    hourly = hardware.hourly_price if hourly_price is None else hourly_price
    return None if hourly is None else hourly * _HOURS_A_MONTH


def costs(device_month: float, devices: int, users: int, tokens_per_second: float) -> Costs:
    """Return the cost of a replica of `devices` devices that serves `users` users at once."""
    month = device_month * devices
    tokens = tokens_per_second * 3600 * _HOURS_A_MONTH
    return Costs(month, month / users, month / tokens * _MILLION)


ServedWeights = Literal["bf16", "int8", "int4"]
_GROUP = 128  # weights that share a scale and a zero point in int4, see `export/quantized.py`
PREFILL = 2048  # tokens of a prompt in one step; engines split longer prompts


@dataclass(frozen=True)
class ServingMemory:
    """The bytes that serving needs on a device."""

    weights: int
    kv_cache: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.kv_cache + self.activations


def serving_memory(
    config: DecoderConfig, weight_bytes: int, sequences: int, tokens: int
) -> ServingMemory:
    """Return the memory that serving needs.

    Args:
        config: The model's shape.
        weight_bytes: The bytes of the model's tensors as stored, quantised or not.
        sequences: The number of sequences answered at once.
        tokens: The tokens of each sequence, prompt and answer.
    """
    return ServingMemory(
        weights=weight_bytes,
        kv_cache=kv_cache_bytes(config, sequences, tokens),
        activations=_activations(config, sequences, min(PREFILL, tokens)),
    )


def served_weight_bytes(config: DecoderConfig, weights: ServedWeights) -> int:
    """Return a model's bytes as `export/quantized.py` writes it; only blocks are quantised.

    int8 has a scale for each row; int4 has a scale and a zero point for each group of a row.
    """
    whole = config.parameters * BF16
    shapes = linear_shapes(config).values()
    numbers = config.layers * sum(rows * columns for rows, columns in shapes)
    if weights == "int8":
        return whole - numbers * (BF16 - 1) + config.layers * sum(rows for rows, _ in shapes) * BF16
    if weights == "int4":
        return whole - numbers * BF16 + numbers // 2 + numbers // _GROUP * 2 * BF16
    return whole


def kv_cache_bytes(config: DecoderConfig, sequences: int, tokens: int) -> int:
    """Return the bytes of all layers' keys and values in bf16, at most a sliding window's."""
    kept = config.positions_seen(tokens)
    numbers = 2 * config.kv_heads * config.head_width
    if config.kv_lora_rank:  # a latent and a key's rotated part, which all heads share
        numbers = config.kv_lora_rank + config.rotary_width
    return numbers * BF16 * sequences * kept


def _cached_heads(config: DecoderConfig) -> int:
    """Return over how many devices what is kept of a token can be divided."""
    return 1 if config.kv_lora_rank else config.kv_heads


def _activations(config: DecoderConfig, sequences: int, tokens: int) -> int:
    """Return the bytes of the layer that holds most, and of each sequence's last logits."""
    feed_forward = (3 if config.gated else 2) * config.hidden_per_token
    attention = (2 * config.heads + 2 * config.kv_heads) * config.head_width
    layer = tokens * (2 * config.width + max(feed_forward, attention)) * BF16
    return round(layer) + sequences * config.vocab_size * (BF16 + FP32)


_GIB = 2**30


@dataclass(frozen=True)
class Traffic:
    """The numbers of tokens of a usual prompt and of its answer."""

    prompt: int
    answer: int

    @property
    def tokens(self) -> int:
        """The number of tokens whose keys and values are kept at the end of an answer."""
        return self.prompt + self.answer


@dataclass(frozen=True)
class ServingPlan:
    """The size, speed and cost of one replica of a model.

    Attributes:
        devices: The fewest devices that hold the model, with tensor parallelism.
        memory: Bytes on each device at full concurrency.
        concurrency: The number of sequences that fit beside the weights.
        stream_tokens_per_second: The bound on the speed of one user alone.
        tokens_per_second: The bound on the speed of all users' answers at full concurrency, with
            prompts read between them.
        bound_by: The bottleneck at full concurrency: memory bandwidth or compute.
        first_token_seconds: The time to read one prompt when nothing else runs.
        cold_start_seconds: The time to read the weights from storage.
        rented: The cost of rented devices; None if no price is known.
        bought: The cost of owned devices; None if it was not asked for.
    """

    devices: int
    memory: ServingMemory
    concurrency: int
    stream_tokens_per_second: float
    tokens_per_second: float
    bound_by: str
    first_token_seconds: float
    cold_start_seconds: float
    rented: Costs | None
    bought: Costs | None


def serving_plan(
    config: DecoderConfig,
    hardware: Hardware,
    *,
    weights: ServedWeights = "bf16",
    traffic: Traffic | None = None,
    storage_bandwidth: float,
    hourly_price: float | None = None,
    owned: Owned | None = None,
) -> ServingPlan:
    """Return the smallest replica of a model on a type of device, with its speed and cost.

    Args:
        config: The model's shape, with vocabulary and context filled in.
        hardware: The type of all devices.
        weights: The stored type of the blocks' matrices; products are computed in bf16.
        traffic: A user's usual prompt and answer; by default 1024 and 256 tokens, or less in
            the same proportion if the model's context is shorter.
        storage_bandwidth: Bytes per second from storage to a replica.
        hourly_price: US dollars per device and hour, instead of the price in `hardware`.
        owned: The cost of an owned device.

    Raises:
        UserError: The model does not fit a node, the traffic exceeds the model's context, or the
            model has no such form.
    """
    if config.experts and weights != "bf16":
        raise UserError(
            f"--weights {weights}: a mixture of experts is exported in bf16 only; give bf16"
        )
    traffic = traffic or _usual(config)
    if traffic.tokens > config.context_length:
        raise UserError(
            f"a prompt of {traffic.prompt} and an answer of {traffic.answer} tokens are longer "
            f"than the model's context of {config.context_length}; ask for less"
        )
    devices = _devices(config, hardware, weights, traffic)
    concurrency = _concurrency(config, hardware, weights, traffic, devices)
    pace = _Pace(config, hardware, weights, traffic, devices)
    speed = pace.tokens_per_second(concurrency)
    month = rented_month(hardware, hourly_price)
    return ServingPlan(
        devices=devices,
        memory=_memory(config, weights, traffic, devices, concurrency),
        concurrency=concurrency,
        stream_tokens_per_second=1 / pace.step(1),
        tokens_per_second=speed,
        bound_by=pace.bound_by(concurrency),
        first_token_seconds=pace.prefill,
        cold_start_seconds=served_weight_bytes(config, weights) / storage_bandwidth,
        rented=None if month is None else costs(month, devices, concurrency, speed),
        bought=None if owned is None else costs(owned.month(hardware), devices, concurrency, speed),
    )


def _usual(config: DecoderConfig) -> Traffic:
    tokens = min(1280, config.context_length)
    return Traffic(prompt=tokens - tokens // 5, answer=tokens // 5)


def _devices(
    config: DecoderConfig, hardware: Hardware, weights: ServedWeights, traffic: Traffic
) -> int:
    ways = [n for n in range(1, hardware.devices_per_node + 1) if not config.heads % n]
    for devices in ways:
        if _concurrency(config, hardware, weights, traffic, devices):
            return devices
    most = _memory(config, weights, traffic, ways[-1], 1).total / HEADROOM
    raise UserError(
        f"serving does not fit: {ways[-1]} devices of a node need {most / _GIB:.3g} GiB each, but "
        f"have {hardware.memory_bytes / _GIB:.3g}; use int8 or int4, a larger device, or fewer "
        f"than {traffic.tokens} tokens"
    )


def _concurrency(
    config: DecoderConfig,
    hardware: Hardware,
    weights: ServedWeights,
    traffic: Traffic,
    devices: int,
) -> int:
    """Return how many sequences fit at once; 0 if not even one fits."""
    none, one = (_memory(config, weights, traffic, devices, n).total for n in (0, 1))
    room = hardware.memory_bytes * HEADROOM - none
    return max(0, int(room / (one - none)))


def _memory(
    config: DecoderConfig, weights: ServedWeights, traffic: Traffic, devices: int, sequences: int
) -> ServingMemory:
    """Return the memory on one device; keys and values of one head cannot be divided."""
    whole = serving_memory(config, served_weight_bytes(config, weights), sequences, traffic.tokens)
    heads = min(devices, _cached_heads(config))
    return ServingMemory(
        weights=-(-whole.weights // devices),
        kv_cache=-(-whole.kv_cache // heads),
        activations=whole.activations,
    )


class _Pace:
    """The bounds on the speed of all devices of a replica together."""

    def __init__(
        self,
        config: DecoderConfig,
        hardware: Hardware,
        weights: ServedWeights,
        traffic: Traffic,
        devices: int,
    ) -> None:
        self._bandwidth = hardware.memory_bandwidth * devices
        self._flops = max(hardware.peak("bf16"), hardware.peak("fp16")) * devices
        self._answer = traffic.answer
        # Untied embeddings are only looked up; keys and values count as midway through the answer.
        looked_up = 0 if config.tie_embeddings else config.vocab_size * config.width * BF16
        self._weights = served_weight_bytes(config, weights) - looked_up
        self._experts = config.layers * config.expert_parameters * BF16
        self._chosen = config.experts_per_token / max(config.experts, 1)
        midway = traffic.prompt + traffic.answer // 2
        copies = max(1, devices // _cached_heads(config))
        self._cache = kv_cache_bytes(config, 1, midway) * copies
        self._token = 2 * matrix_parameters(config) + _attention(config, midway)
        # Attention is causal, so a token of the prompt sees half of the prompt on average.
        prompt = 2 * matrix_parameters(config) + _attention(config, traffic.prompt // 2)
        self.prefill = max(traffic.prompt * prompt / self._flops, self._weights / self._bandwidth)

    def step(self, sequences: int) -> float:
        """Return the seconds to generate one token for each sequence."""
        return max(self._reading(sequences), self._computing(sequences))

    def bound_by(self, sequences: int) -> str:
        """Return the resource that limits a step."""
        reads = self._reading(sequences) >= self._computing(sequences)
        return "memory bandwidth" if reads else "compute"

    def tokens_per_second(self, sequences: int) -> float:
        """Return the speed of all answers together; while one prompt is read, all others wait."""
        seconds = self._answer * self.step(sequences) + sequences * self.prefill
        return sequences * self._answer / seconds

    def _reading(self, sequences: int) -> float:
        # Experts that no sequence chooses, if each chooses evenly, are not read.
        left = self._experts * (1 - self._chosen) ** sequences
        return (self._weights - left + sequences * self._cache) / self._bandwidth

    def _computing(self, sequences: int) -> float:
        return sequences * self._token / self._flops


def _attention(config: DecoderConfig, seen: int) -> int:
    """Return the attention FLOPs of a token that sees `seen` tokens: scores and weighted values."""
    return 2 * config.heads * (config.head_width + config.value_width) * config.positions_seen(seen)
