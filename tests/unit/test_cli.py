"""The command's frame: quick, and one line for a person's mistake."""

import resource
import subprocess
import sys
from pathlib import Path

PENSTOCK = Path(sys.prefix) / "bin" / "penstock"
HEAVY = ("torch", "ray", "mlflow", "airflow", "great_expectations", "dvc", "transformers")


def test_help_takes_a_third_of_a_second_of_one_core() -> None:
    subprocess.run([PENSTOCK, "--help"], check=True, capture_output=True)  # writes the bytecode
    seconds = []
    for _ in range(3):  # CPU time, and the best of three: other processes must not decide this
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([PENSTOCK, "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.4, seconds


def test_no_heavy_import_stands_before_a_command() -> None:
    script = f"import sys, pipelines.cli; print([m for m in {HEAVY!r} if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert output.stdout.strip() == "[]"


def test_a_mistake_is_one_line_and_exit_code_2() -> None:
    result = subprocess.run([PENSTOCK, "logs", "no-such-part"], capture_output=True, text=True)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "no-such-part" in result.stderr
    assert "scheduler" in result.stderr
