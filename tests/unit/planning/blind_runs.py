"""Published runs that the planner was not fitted to, with what it predicts for each.

The predictions were committed before the published figures were entered: the column `blind` of
`published/blind_results.csv`, which nobody changes. After a change of the planner that is meant to
alter its times, write the column `today` again; docs/training.md needs the lines that it prints:

    .venv/bin/python -m tests.unit.planning.blind_runs
"""

import csv
from pathlib import Path
from statistics import median

from pipelines.models.config import DecoderConfig
from pipelines.parallel.layout import Layout
from pipelines.planning.hardware_table import named
from pipelines.planning.memory_training import Training
from pipelines.planning.roofs import flops_per_token
from pipelines.planning.step_time import step_time

FOLDER = Path(__file__).parent / "published"
RESULTS = FOLDER / "blind_results.csv"
Row = dict[str, str]
# What the documentation calls runs, by the first word of their names; A100 runs come apart.
GROUPS = {
    "torchtitan: Llama 3 8B, float8, compiled, H200": ("torchtitan",),
    "fms-fsdp: Llama 2 7B and 70B, compiled, A100": ("fms A100",),
    "fms-fsdp and OLMo-core: 7B to 70B, compiled, H100": ("fms", "olmo-core", "olmo2"),
    "Meta: Llama 3 405B, 8,192 and 16,384 H100": ("llama3",),
    "NeMo and Megatron-Bridge: 5B to 405B, fp8, H100 and B200": ("nemo", "bridge"),
    "Megatron-LM and MT-NLG, 2021: 1.7B to 1T, A100": ("megatron", "mt-nlg"),
}


def table(path: Path) -> list[Row]:
    with path.open() as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


RUNS = {row["run"]: row for row in table(FOLDER / "blind.csv")}
_MODELS = {row["model"]: row for row in table(FOLDER / "blind_models.csv")}


def model(run: Row) -> DecoderConfig:
    row = _MODELS[run["model"]]
    shape = {key: int(row[key]) for key in ("layers", "width", "heads", "kv_heads", "hidden")}
    return DecoderConfig(
        **shape,
        vocab_size=int(row["vocabulary"]),
        context_length=int(run["sequence"]),
        gated=row["gated"] == "1",
        positions=row["positions"],
        tie_embeddings=row["tied"] == "1",
    )


def training(run: Row) -> Training:
    sizes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    return Training(
        layout=Layout(**{key: int(run[key]) for key in sizes}),
        sharding=run["sharding"],
        micro_batch=int(run["micro_batch"]),
        micro_batches=int(run["accumulation"]),
        sequence=int(run["sequence"]),
        precision=run["precision"],
        activation_checkpoint=run["recompute"],
        schedule=run["schedule"],
        compiled=run["compile"] == "1",
    )


def step_tokens(run: Row) -> int:
    """Tokens of the global batch."""
    each = int(run["micro_batch"]) * int(run["accumulation"]) * int(run["sequence"])
    return each * training(run).layout.dp


def predicted(run: Row) -> float:
    """Tokens a second and GPU, with the hardware table's entry as it is."""
    seconds = step_time(model(run), training(run), named(run["gpu"])).total
    return step_tokens(run) / seconds / training(run).layout.world


def published(result: Row) -> float:
    """The published figure as tokens a second and GPU."""
    run, figure = RUNS[result["run"]], float(result["published"])
    config, length = model(run), int(run["sequence"])
    flops = flops_per_token(config, length)
    head = 6 * config.vocab_size * config.width
    return {
        "tokens/s": figure,
        "s": step_tokens(run) / int(run["gpus"]) / figure,
        "model TFLOP/s": figure * 1e12 / flops,
        # The blocks' forward pass, a third of their model FLOPs, is computed again.
        "TFLOP/s": figure * 1e12 / (flops + (flops - head) / 3),
    }[result["unit"]]


def errors(column: str) -> dict[str, float]:
    """How far a column of predictions is from what was published: 0.1 is 10 % too fast."""
    return {row["run"]: float(row[column]) / published(row) - 1 for row in table(RESULTS)}


def _group(run: str) -> str:
    return run.split()[0] + (" A100" if run.endswith("A100") else "")


def summary() -> list[str]:
    """The lines of the table in docs/training.md."""
    found, lines = errors("today"), []
    for label, words in GROUPS.items():
        each = [error for run, error in found.items() if _group(run) in words]
        span = f"{min(each):+.0%} to {max(each):+.0%}"
        lines.append(f"| {label} | {len(each)} | {span} |".replace("-0%", "0%"))
    sizes = [abs(error) for error in found.values()]
    within = sum(size <= 0.15 for size in sizes)
    middle = f"| all: median {median(sizes):.0%}, worst {max(sizes):.0%} "
    return [*lines, f"{middle}| {len(sizes)} | {within} within 15% |"]


def main() -> None:
    """Write the column `today` again."""
    comments = [line for line in RESULTS.read_text().splitlines(True) if line.startswith("#")]
    rows = table(RESULTS)
    for row in rows:
        row["today"] = f"{predicted(RUNS[row['run']]):.5g}"
    with RESULTS.open("w", newline="") as file:
        file.writelines(comments)
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(*summary(), sep="\n")


if __name__ == "__main__":
    main()
