"""`penstock models` where no platform is up."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.services.preflight import free_port

PENSTOCK = Path(sys.prefix) / "bin" / "penstock"


@pytest.mark.parametrize(
    "command", [["list"], ["show", "a-model"], ["generate", "a-model@champion"]]
)
def test_a_registry_that_is_down_is_one_quick_line(command: list[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    environment = os.environ | {"MLFLOW_TRACKING_URI": url, "no_proxy": "*", "NO_PROXY": "*"}
    began = time.monotonic()
    result = subprocess.run(
        [PENSTOCK, "models", *command], env=environment, capture_output=True, text=True
    )
    seconds = time.monotonic() - began
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert url in line
    assert "penstock up" in line
    assert seconds < 8  # 0.7 on a machine with nothing else to do; MLflow's client takes 13
