from dataclasses import replace

import pytest

from pipelines.models.presets import preset
from pipelines.planning.hardware import Hardware
from pipelines.planning.hardware_table import ENTRIES, of_driver
from pipelines.planning.roofs import (
    Share,
    flops_per_token,
    matrix_parameters,
    step_work,
    utilisation,
)

SHAPE = preset("llama-10m").sized(vocab_size=4096, context_length=2048)
CPU = Hardware("a CPU", {"fp32": 1e11}, memory_bandwidth=1e10)


def test_flops_are_those_of_palm() -> None:
    # Tied embeddings are the head, so N is all parameters but the last norm.
    assert matrix_parameters(SHAPE) == SHAPE.parameters - SHAPE.width
    attention = 12 * 6 * 512 * 320
    assert flops_per_token(SHAPE, 512) == 6 * matrix_parameters(SHAPE) + attention


def test_frozen_weights_need_two_thirds() -> None:
    attention = 12 * 6 * 512 * 320
    assert flops_per_token(SHAPE, 512, trainable=0.0) == 4 * matrix_parameters(SHAPE) + attention


def test_mfu_of_an_h100_that_does_400_teraflops() -> None:
    h100 = of_driver("NVIDIA H100 80GB HBM3")
    work = step_work(SHAPE, Share(tokens=4096, length=512, micro_batches=1), "bf16")
    used = utilisation(work, h100, "bf16", seconds=work.flops / 400e12)
    assert used.mfu == pytest.approx(400 / 989.4)


def test_processes_share_flops_and_updates() -> None:
    alone = step_work(SHAPE, Share(tokens=4096, length=512, micro_batches=4), "fp32")
    two = step_work(
        SHAPE, Share(tokens=4096, length=512, micro_batches=2, data=2, shards=2), "fp32"
    )
    assert two.flops == alone.flops / 2
    update = 4 * 10 * SHAPE.parameters
    assert alone.memory_bytes / 2 - two.memory_bytes == pytest.approx(0, abs=update / 100)


def test_half_precision_halves_activations() -> None:
    def activations(precision) -> float:
        small, large = (
            step_work(
                SHAPE, Share(tokens=tokens, length=512, micro_batches=1), precision
            ).memory_bytes
            for tokens in (1024, 2048)
        )
        return large - small

    assert activations("bf16") == activations("fp32") / 2


@pytest.mark.parametrize(
    ("shares", "binds"),
    [
        ({}, "compute"),
        ({"network": 0.95}, "network"),
        ({"storage": 0.95}, "storage"),
    ],
)
def test_the_greatest_share_binds(shares: dict[str, float], binds: str) -> None:
    work = step_work(SHAPE, Share(tokens=1 << 20, length=512, micro_batches=1), "fp32")
    used = utilisation(work, CPU, "fp32", seconds=work.flops / 0.9e11, **shares)
    assert used.bound_by() == (binds, pytest.approx(shares.get(binds, 0.9)))


def test_a_roof_that_is_not_reached_by_half_binds_nothing() -> None:
    work = step_work(SHAPE, Share(tokens=1 << 20, length=512, micro_batches=1), "fp32")
    used = utilisation(work, CPU, "fp32", seconds=work.flops / 0.3e11, network=0.1, storage=0.05)
    assert used.bound_by() == ("host", pytest.approx(1 - 0.3 - 0.1 - 0.05))


def test_few_tokens_are_bound_by_memory_which_a_cpu_calls_by_its_name() -> None:
    work = step_work(SHAPE, Share(tokens=1, length=512, micro_batches=1), "fp32")
    gpu = of_driver("NVIDIA L4")
    assert gpu is not None
    for device, name in ((CPU, "CPU memory"), (gpu, "device-memory bandwidth")):
        seconds = work.memory_bytes / device.memory_bandwidth / 0.9
        used = utilisation(work, device, "fp32", seconds=seconds)
        assert used.bound_by() == (name, pytest.approx(0.9))


def test_offloaded_weights_bind_at_pcie() -> None:
    share = Share(tokens=1, length=512, micro_batches=8, offloaded=True)
    work, gpu = step_work(SHAPE, share, "bf16"), of_driver("NVIDIA H200")
    assert gpu is not None
    assert gpu.pcie_bandwidth is not None
    used = utilisation(work, gpu, "bf16", seconds=work.pcie_bytes / gpu.pcie_bandwidth / 0.9)
    assert used.bound_by() == ("PCIe", pytest.approx(0.9))


def test_paged_moments_come_once_a_step() -> None:
    share = Share(tokens=1, length=512, micro_batches=8, shards=4)
    plain, paged = (step_work(SHAPE, replace(share, paged=each), "bf16") for each in (False, True))
    assert paged.pcie_bytes - plain.pcie_bytes == 8 * SHAPE.parameters / 4


def test_datasheets_are_dense_and_in_order() -> None:
    for hardware in ENTRIES.values():
        rates = [hardware.flops[kind] for kind in ("fp32", "bf16", "fp8") if kind in hardware.flops]
        assert rates == sorted(rates)
        assert hardware.memory_bandwidth > (hardware.pcie_bandwidth or 0)
    assert of_driver("NVIDIA H200").peak("bf16") == 989.4e12
    assert of_driver("Tesla T4").peak("bf16") == 8.1e12  # it has none


def test_frozen_weights_are_read_as_they_lie_and_not_written():
    share = Share(tokens=1, length=1, micro_batches=1, trainable=0.0)
    in_fp32, in_nf4 = (
        step_work(SHAPE, replace(share, frozen_bytes=size), "fp32").memory_bytes
        for size in (4.0, 0.5)
    )
    assert in_fp32 - in_nf4 == 2 * 3.5 * SHAPE.parameters
