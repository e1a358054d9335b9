"""`python -m tests.benchmarks [NAME] [--pairs N] [--json]`: what `penstock bench` runs."""

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core.settings import load_settings
from pipelines.core.storage import fresh_folder, read_json, write_json
from tests.benchmarks.harness import Benchmark, kept_limits, ratios, run_case

if TYPE_CHECKING:
    from rich.table import Table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
OPTIONS = "options.json"  # written last: the data are whole
_GPU_FACTS = ["name", "driver_version", "memory.total", "power.limit", "clocks.max.sm"]


def main() -> int:
    """Run a benchmark; 1 where a demand is not reached."""
    parser = argparse.ArgumentParser(prog="penstock bench")
    parser.add_argument("name", nargs="?", choices=names())
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.name is None:
        sys.stdout.write("\n".join(names()) + "\n")
        return 0
    module = importlib.import_module(f"tests.benchmarks.{arguments.name}")
    if not hasattr(module, "BENCHMARK"):  # what is no race has its own way
        code: int = module.main(RESULTS, device(), as_json=arguments.json)
        return code
    benchmark: Benchmark = module.BENCHMARK
    result = measure(benchmark, arguments.pairs or benchmark.pairs)
    if result["pairs"] >= benchmark.pairs:
        write_json(RESULTS / f"{benchmark.name}.json", result)
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        show(result)
    demands = [each for case in result["cases"] for each in (*case["ratios"], *case["limits"])]
    return 0 if all(each["reached"] for each in demands) else 1


def names() -> list[str]:
    """Every benchmark here."""
    inner = {"__init__", "__main__", "contender", "harness", "page_cache", "local_platform"}
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in inner)


def measure(benchmark: Benchmark, pairs: int) -> dict[str, Any]:
    """All cases, as the results file has them."""
    folder = load_settings().home / "bench" / benchmark.name
    options = data_options(benchmark, folder)
    cases = []
    with benchmark.service(folder) as served:
        for case, more in benchmark.cases.items():
            _tell(f"{benchmark.name} {case}")
            given = options | served | more
            figures = run_case(benchmark, folder, given, pairs, _tell)
            cases.append(
                {
                    "case": case,
                    "contenders": {name: each.summary() for name, each in figures.items()},
                    "ratios": list(ratios(benchmark, case, figures)),
                    "limits": list(kept_limits(benchmark, figures)),
                }
            )
    return {
        "benchmark": benchmark.name,
        "command": f"penstock bench {benchmark.name} --pairs {pairs}",
        "unit": benchmark.figure,
        "pairs": pairs,
        "device": device(),
        "cases": cases,
    }


def data_options(benchmark: Benchmark, folder: Path) -> dict[str, Any]:
    """What the contenders are told of the data, which are made on first use."""
    if not (folder / OPTIONS).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        with fresh_folder(folder) as fresh:
            write_json(fresh / OPTIONS, benchmark.make_data(fresh))
    options: dict[str, Any] = read_json(folder / OPTIONS)
    return options


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")


def device() -> dict[str, Any]:
    """What the figures were taken on."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "?")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpus": gpus(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "load_before": round(os.getloadavg()[0], 2),
    }


def gpus() -> list[dict[str, str]]:
    """What NVIDIA's driver says of each GPU; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FACTS)}", "--format=csv,noheader"]
    told = subprocess.run(query, check=True, capture_output=True, text=True).stdout
    return [dict(zip(_GPU_FACTS, line.split(", "), strict=True)) for line in told.splitlines()]


def show(result: dict[str, Any]) -> None:
    """The figures as tables."""
    from rich.console import Console  # a bare machine may have no rich: `--json` does without

    console = Console()
    for case in result["cases"]:
        console.print(_table(f"{result['benchmark']} {case['case']}", result["unit"], case))
        for name, figures in case["contenders"].items():
            for key, value in figures.items():
                if isinstance(value, dict):  # too wide for a column
                    console.print(f"{name}, {key}: {json.dumps(value)}", soft_wrap=True)
        for ratio in case["ratios"]:
            console.print(
                f"{ratio['of']} over {ratio['over']}{_named(ratio)}: {ratio['median']:.2f}x "
                f"({ratio['min']:.2f} to {ratio['max']:.2f}), demanded {ratio['demanded']}x: "
                f"{_verdict(ratio)}"
            )
        for limit in case["limits"]:
            console.print(
                f"{limit['of']}, {limit['figure']}: {limit['is']:.2f}, at most {limit['most']}: "
                f"{_verdict(limit)}"
            )


def _named(ratio: dict[str, Any]) -> str:
    return f", {ratio['figure']}" if "figure" in ratio else ""


def _verdict(demand: dict[str, Any]) -> str:
    return "reached" if demand["reached"] else "NOT REACHED"


def _table(title: str, unit: str, case: dict[str, Any]) -> "Table":
    """A row a contender: its rate, and the further figures that any of them gave."""
    from rich.table import Table

    columns = {"median": f"median {unit}", "min": "least", "max": "most"}
    for figures in case["contenders"].values():
        hidden = {key for key, value in figures.items() if isinstance(value, dict)}
        columns |= {key: key for key in figures if key not in {*columns, *hidden, "setup_seconds"}}
    table = Table("", title=title, title_justify="left")
    for column in columns.values():
        table.add_column(column, justify="right")
    for name, figures in case["contenders"].items():
        table.add_row(name, *(_cell(figures.get(key, "")) for key in columns))
    return table


def _cell(figure: Any) -> str:
    return f"{figure:,.4g}" if isinstance(figure, int | float) else str(figure)


if __name__ == "__main__":
    sys.exit(main())
