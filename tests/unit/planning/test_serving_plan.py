"""The bounds against published figures, and what follows from them."""

from dataclasses import replace

import pytest

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.models.presets import preset
from pipelines.planning.hardware_table import named
from pipelines.planning.memory import HEADROOM
from pipelines.planning.serving_plan import (
    Owned,
    Traffic,
    kv_cache_bytes,
    served_weight_bytes,
    serving_plan,
)

GIB = 2**30
STORAGE = 2e9
LLAMA = preset("llama3-8b")


def plan(model: str, gpu: str, **further):
    return serving_plan(preset(model), named(gpu), storage_bandwidth=STORAGE, **further)


def test_a_token_of_opt_13b_keeps_800_kib():
    """Kwon et al. 2023 (vLLM), section 3: 2 x 5120 x 40 layers x 2 bytes, 1.6 GB for 2048."""
    opt = DecoderConfig(layers=40, width=5120, heads=40, kv_heads=40, hidden=20_480)
    assert kv_cache_bytes(opt, 1, 1) == 800 * 1024
    assert kv_cache_bytes(opt, 1, 2048) == pytest.approx(1.6 * GIB, rel=0.03)


@pytest.mark.parametrize(("weights", "measured"), [("bf16", 107.0), ("int8", 157.4)])
def test_one_stream_stays_below_the_bound_as_gpt_fast_measured_it(weights, measured):
    """PyTorch's blog of 30 November 2023: Llama 2 7B on an A100 80 GB, 72% of the bandwidth."""
    bound = plan("llama2-7b", "a100-80", weights=weights, traffic=Traffic(8, 200))
    assert 0.5 < measured / bound.stream_tokens_per_second < 0.75


@pytest.mark.parametrize(
    ("model", "gpu", "weights", "devices"),
    [
        ("llama3-8b", "h100", "bf16", 1),
        ("llama3-8b", "rtx4090", "bf16", 1),
        ("llama3-8b", "t4", "bf16", 2),
        ("llama3-8b", "t4", "int8", 1),
        ("llama3-70b", "h100", "bf16", 2),
        ("llama3-70b", "mi300x", "bf16", 1),
        ("llama3-70b", "h100", "int4", 1),
        ("gpt3-175b", "h100", "bf16", 6),
    ],
)
def test_a_replica_takes_the_fewest_devices_that_hold_it(model, gpu, weights, devices):
    served = plan(model, gpu, weights=weights)
    assert served.devices == devices
    assert served.concurrency > 0
    assert served.memory.total <= named(gpu).memory_bytes * HEADROOM


def test_one_stream_reads_its_own_experts_and_many_read_all():
    mixtral, bytes_a_second = preset("mixtral-8x7b"), 2 * named("h100").memory_bandwidth
    served = plan("mixtral-8x7b", "h100", traffic=Traffic(8, 8))
    looked_up = mixtral.vocab_size * mixtral.width
    alone = bytes_a_second / (2 * (mixtral.active_parameters - looked_up))
    assert served.stream_tokens_per_second == pytest.approx(alone, rel=0.01)
    # At full concurrency each expert has some sequence that chose it.
    whole = 2 * (mixtral.parameters - looked_up)
    assert served.tokens_per_second < served.concurrency * bytes_a_second / whole


def test_a_mixture_has_no_smaller_form():
    with pytest.raises(UserError, match=r"--weights int8: a mixture of experts is exported in bf1"):
        plan("mixtral-8x7b", "h100", weights="int8")


def test_what_fits_no_node_is_refused():
    with pytest.raises(UserError, match=r"8 devices of a node need \S+ GiB each, but have 15"):
        plan("gpt3-175b", "t4")
    with pytest.raises(UserError, match="longer than the model's context of 1024"):
        plan("gpt2-124m", "h100", traffic=Traffic(1000, 100))


def test_shorter_sequences_let_in_more_users_and_give_more_tokens():
    long, short = (plan("llama3-8b", "h100", traffic=Traffic(n, 256)) for n in (4096, 512))
    assert short.concurrency > 4 * long.concurrency
    assert short.tokens_per_second > long.tokens_per_second
    assert short.first_token_seconds < long.first_token_seconds
    assert long.stream_tokens_per_second < long.tokens_per_second


def test_what_binds():
    """Few users wait for weights to be read; with little to read, many wait for products."""
    assert plan("llama3-8b", "h100").bound_by == "memory bandwidth"
    quick = replace(named("h100"), memory_bandwidth=1e15)
    bound = serving_plan(LLAMA, quick, storage_bandwidth=STORAGE)
    assert bound.bound_by == "compute"
    most = quick.peak("bf16") / (2 * LLAMA.parameters)
    assert 0.1 * most < bound.tokens_per_second < most  # prompts take their time


def test_quantised_weights_start_sooner_and_leave_room():
    whole, half = (plan("llama3-8b", "h100", weights=kind) for kind in ("bf16", "int8"))
    assert whole.cold_start_seconds == pytest.approx(2 * LLAMA.parameters / STORAGE)
    assert half.cold_start_seconds < 0.6 * whole.cold_start_seconds
    assert half.concurrency > whole.concurrency
    assert served_weight_bytes(LLAMA, "int4") < served_weight_bytes(LLAMA, "int8")


def test_costs_follow_from_price_power_and_years():
    rented = plan("llama3-70b", "h100", hourly_price=2.0).rented
    assert rented is not None
    assert rented.instance_month == pytest.approx(2 * 2.0 * 730.5)
    owned = Owned(price=30_000, kwh_price=0.1, years=5, overhead=1.5, rack_kw_month=200)
    served = plan("llama3-70b", "h100", owned=owned)
    assert served.bought is not None
    power = 0.7 * 1.5 * 0.1 * 730.5
    assert served.bought.instance_month == pytest.approx(2 * (500 + power + 0.7 * 200))
    assert served.bought.user_month * served.concurrency == pytest.approx(
        served.bought.instance_month
    )
    tokens = served.tokens_per_second * 730.5 * 3600
    assert served.bought.million_tokens * tokens / 1e6 == pytest.approx(
        served.bought.instance_month
    )
    assert plan("llama3-8b", "cpu").rented is None
    assert plan("llama3-8b", "cpu").bought is None
