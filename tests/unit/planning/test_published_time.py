"""Predicted throughput against tables that others have measured, and FLOPs against a paper.

LLM Foundry's tables are predicted with the entries of the hardware table as they are. Its rows of
A100 with 80 GB set two figures, `TRAFFIC_RATE` and the speed of the attention kernel of the time;
those of A100 with 40 GB and of H100 set none, beside each device's MFU, which is the middle of its
rows of 2048 tokens.

torchtitan's boards are not in the hardware table (less power, slower memory). Their MFU and the
last two fitted figures of `step_time.py` are set by the first four rows; the other twelve set none.
"""

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.models.config import DecoderConfig
from pipelines.models.presets import preset
from pipelines.parallel.layout import Layout
from pipelines.planning.communication import communication
from pipelines.planning.hardware import Hardware
from pipelines.planning.hardware_table import named
from pipelines.planning.memory_training import Training
from pipelines.planning.roofs import flops_per_token
from pipelines.planning.step_time import FLASH_1, HIDDEN_BY_ASYNC_TP, bubble, step_time

WITHIN = 0.15
# Layers, width, heads of MPT.
MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
# Rows that are further away, all too slow beside their neighbours in the same table, as
# `test_farther_rows_are_out_of_line` shows. 30B with 8192 tokens fills its memory.
FARTHER = {
    "h100": {"30b x 8192 bf16"},
    "a100-80": {"30b x 8192 bf16", "760m x 512 bf16"},
    "a100-40": {"70b x 2048 bf16"},
}
TITAN = replace(named("h100"), memory_bandwidth=2.4e12)
LLAMA = {
    "8b": preset("llama3-8b"),
    "70b": preset("llama3-70b"),
    "405b": replace(preset("llama3-70b"), layers=126, width=16_384, heads=128, hidden=53_248),
}


def table(name: str) -> list[dict[str, str]]:
    with (Path(__file__).parent / "published" / name).open() as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def foundry(row: dict[str, str]) -> tuple[DecoderConfig, Training]:
    layers, width, heads = MPT[row["model"]]
    config = DecoderConfig(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        hidden=4 * width,
        vocab_size=50_368,
        context_length=int(row["sequence"]),
        gated=False,
        positions="learned",
    )
    training = Training(
        layout=Layout(dp_shard=int(row["gpus"])),
        sharding=row["sharding"],
        micro_batch=int(row["micro_batch"]),
        micro_batches=int(row["accumulation"]),
        sequence=int(row["sequence"]),
        precision=row["precision"],
        activation_checkpoint="full" if row["recompute"] == "1" else "none",
    )
    return config, training


def foundry_errors(gpu: str) -> Iterator[tuple[str, float]]:
    for row in table("llm_foundry.csv"):
        if row["gpu"] != gpu:
            continue
        config, training = foundry(row)
        tokens = training.micro_batch * training.micro_batches * training.sequence
        predicted = tokens / step_time(config, training, named(gpu), FLASH_1).total
        name = f"{row['model']} x {row['sequence']} {row['precision']}"
        yield name, predicted / float(row["throughput"]) - 1


@pytest.mark.parametrize(("gpu", "rows"), [("h100", 77), ("a100-80", 61), ("a100-40", 78)])
def test_llm_foundry(gpu: str, rows: int) -> None:
    """`submit_benchmarks.py` of the tables' commits takes the Triton kernel of FlashAttention 1."""
    errors = list(foundry_errors(gpu))
    assert len(errors) == rows
    assert {name for name, error in errors if abs(error) > WITHIN} == FARTHER[gpu]


def measured_mfu(gpu: str, model: str, sequence: int, gpus: int) -> float:
    """Of LLM Foundry's rows of that kind, the mean."""
    found = []
    for row in table("llm_foundry.csv"):
        if (row["gpu"], row["model"], row["precision"]) != (gpu, model, "bf16"):
            continue
        if (int(row["sequence"]), int(row["gpus"])) == (sequence, gpus):
            config, _ = foundry(row)
            flops = flops_per_token(config, sequence) * float(row["throughput"])
            found.append(flops / named(gpu).peak("bf16"))
    return sum(found) / len(found)


def test_farther_rows_are_out_of_line() -> None:
    """Neighbours differ by a few percent, these rows from theirs by 15 to 30."""
    for gpu in ("h100", "a100-80"):
        thirty = measured_mfu(gpu, "30b", 8192, 8) / measured_mfu(gpu, "30b", 4096, 8)
        seven = measured_mfu(gpu, "7b", 8192, 8) / measured_mfu(gpu, "7b", 4096, 8)
        assert thirty < 0.84 < 0.9 < seven
    # The same tokens and memory a step as with 2048, and neither a smaller nor a larger model, nor
    # this one on an H100, is slower with short samples.
    others = [("a100-80", "350m"), ("a100-80", "1b"), ("a100-80", "3b"), ("h100", "760m")]
    shorter = [measured_mfu(*each, 512, 8) / measured_mfu(*each, 2048, 8) for each in others]
    assert min(shorter) > 0.97
    assert measured_mfu("a100-80", "760m", 512, 8) / measured_mfu("a100-80", "760m", 2048, 8) < 0.8
    # Half the devices and half the micro-batch cost a fourth; on the larger A100 micro-batches of 2
    # do not, see its 32 devices.
    fewer = measured_mfu("a100-40", "70b", 2048, 64) / measured_mfu("a100-40", "70b", 2048, 128)
    small = measured_mfu("a100-80", "70b", 2048, 32) / measured_mfu("a100-80", "70b", 2048, 64)
    assert fewer < 0.75 < 0.9 < small


def titan_training(row: dict[str, str]) -> Training:
    return Training(
        layout=Layout(**{key: int(row[key]) for key in ("pp", "dp_shard", "cp", "tp")}),
        sharding="full",
        micro_batch=int(row["micro_batch"]),
        micro_batches=int(row["accumulation"]),
        sequence=int(row["sequence"]),
        precision=row["precision"],
        activation_checkpoint=row["recompute"],
        schedule=row["schedule"],
        compiled=row["compile"] == "1",
    )


def as_torchtitan(config: DecoderConfig, training: Training, hardware: Hardware) -> float:
    """Seconds of a step with what torchtitan does otherwise than this project.

    - Selective checkpointing keeps every other product: wk, wo and w3 are computed again.
    - Context parallelism is a ring, which hides its exchanges. Of the causal half each process
      has another part, and all wait for the last one's: 2 - 1/n of the mean (Brandon et al.
      2023, "Striped Attention", section 3).
    - In float8 tensor parallel processes gather what they multiply in float8: of nine or ten
      halves of sums two, or four where all is computed again, take half as long.
    - Asynchronous tensor parallelism (405B) hides a part of its sums, as much as of 70B's.
    """
    step = step_time(config, training, hardware)
    sent = communication(config, training, hardware, 1.0)
    layout, is_full = training.layout, training.activation_checkpoint == "full"
    products, attention, network = step.products, step.attention, step.network
    if not is_full:
        full = step_time(config, replace(training, activation_checkpoint="full"), hardware)
        again = config.kv_heads * config.head_width + config.width + config.hidden
        whole = config.layer_parameters - config.hidden * config.width
        products += (full.products - products) * again * config.width / whole
    if layout.cp > 1:
        attention *= 2 - 1 / layout.cp
        network -= sent.context
    summed = sent.tensor
    if training.precision == "fp8":
        summed *= 1 - (2 / 11 if is_full else 1 / 10)
    if config == LLAMA["405b"]:
        summed *= 1 - HIDDEN_BY_ASYNC_TP
    network += summed - sent.tensor
    busy = products + attention + step.traffic + network
    return busy / (1 - bubble(training.schedule, layout.pp, training.micro_batches))


def titan_throughput(row: dict[str, str], mfu: float) -> float:
    """Tokens a second and GPU."""
    training = titan_training(row)
    tokens = training.micro_batch * training.micro_batches * training.sequence
    seconds = as_torchtitan(LLAMA[row["model"]], training, replace(TITAN, mfu=mfu))
    return tokens * training.layout.dp / training.layout.world / seconds


def calibrated(row: dict[str, str]) -> float:
    """The MFU with which this row comes out, by halving."""
    low, high = 0.1, 0.6
    while high - low > 1e-4:
        middle = (low + high) / 2
        below = titan_throughput(row, middle) < float(row["throughput"])
        low, high = (middle, high) if below else (low, middle)
    return low


def test_torchtitan() -> None:
    rows = table("torchtitan.csv")
    mfu = calibrated(rows[1])
    assert mfu == pytest.approx(0.31, abs=0.01)
    errors = {
        " ".join(row.values()): titan_throughput(row, mfu) / float(row["throughput"]) - 1
        for row in rows
    }
    assert len(errors) == 16
    # 17 % too fast; the same with two stages a process is within 1 %.
    farther = {name for name, error in errors.items() if abs(error) > WITHIN}
    assert farther == {"405b 8 8 1 8 1 32 8192 fp8 1 full 1f1b 100"}


def test_asynchronous_tensor_parallelism_is_as_much_faster_as_published() -> None:
    """876 over 829 tokens/s of 70B, which was in float8; this project has it in bf16 only."""
    rows = table("torchtitan.csv")
    (row,) = (row for row in rows if row["throughput"] == "597.3")
    training, board = titan_training(row), replace(TITAN, mfu=calibrated(rows[1]))
    apart, overlapped = (
        step_time(LLAMA["70b"], replace(training, async_tp=async_tp), board).total
        for async_tp in (False, True)
    )
    assert apart / overlapped == pytest.approx(876 / 829, abs=0.005)


@pytest.mark.parametrize(
    ("schedule", "pp", "number", "share"),
    [
        ("1f1b", 8, 32, 7 / 39),
        ("gpipe", 4, 12, 3 / 15),
        ("interleaved_1f1b", 8, 32, 7 / 71),
        ("zero_bubble", 4, 8, 1 / 17),
        ("1f1b", 1, 8, 0),
    ],
)
def test_a_pipeline_waits_as_its_schedule_says(schedule, pp, number, share) -> None:
    assert bubble(schedule, pp, number) == pytest.approx(share)
