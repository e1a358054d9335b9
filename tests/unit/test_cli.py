"""The command's frame: quick, and one line for a person's mistake."""

import os
import subprocess
import sys
import time
from pathlib import Path

PENSTOCK = Path(sys.prefix) / "bin" / "penstock"
HEAVY = ("torch", "ray", "mlflow", "airflow", "great_expectations", "dvc", "transformers")


def test_help_takes_half_a_second_at_most() -> None:
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def seconds() -> float:
        began = time.perf_counter()
        subprocess.run([PENSTOCK, "--help"], check=True, capture_output=True, env=environment)
        return time.perf_counter() - began

    seconds()  # writes the bytecode
    # The aim is 0.3 s on a quiet machine; the best of three, for other programs take their share.
    assert min(seconds() for _ in range(3)) < 0.5


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
