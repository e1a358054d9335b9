"""The command's frame: quick, and one line for a user's mistake."""

import subprocess
import sys
from pathlib import Path

from tests.processor_time import limit, seconds_of

PENSTOCK = Path(sys.prefix) / "bin" / "penstock"
HEAVY = ("torch", "ray", "mlflow", "airflow", "great_expectations", "dvc", "transformers")


def test_help_takes_half_a_second_at_most() -> None:
    assert seconds_of(PENSTOCK, "--help") < limit(0.5)  # 0.3 on a quiet machine


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
