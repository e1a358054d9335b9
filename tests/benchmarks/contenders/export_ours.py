"""Ours: a form of a folder is written and measured, by a new process in each round.

So importing torch, transformers and torchao is in the time, as it is for a user's command.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.contender import Round, serve


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    def run_round() -> tuple[float, dict[str, Any]]:
        command = [sys.executable, "-m", __spec__.name, str(folder), options["form"], "measure"]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        return 1, json.loads(said)

    return run_round


def measure(source: Path, form: Any, documents: Path) -> dict[str, float]:
    """The written form's size and score."""
    import pyarrow.parquet as pq

    from pipelines.evaluation.perplexity import STRIDE
    from pipelines.export.variants import write_variant
    from pipelines.models.model_folder import weight_files
    from pipelines.models.safetensors_files import weight_bytes
    from pipelines.run.progress import ProgressMeter
    from pipelines.stages.held_out import HeldOut, score_export

    meter = ProgressMeter(form, lambda each: print(each.line(), file=sys.stderr), interval=5)
    with tempfile.TemporaryDirectory() as name:
        to = Path(name)
        write_variant(source, to, form, group=128)
        held_out = HeldOut(pq.read_table(documents), 0.0, STRIDE)
        bits = score_export(to, held_out, meter)
        return {"weight bytes": weight_bytes(weight_files(to)), "bits per byte": bits}


if __name__ == "__main__":
    if sys.argv[-1] == "measure":
        found = measure(
            Path(sys.argv[1]) / "model", sys.argv[2], Path(sys.argv[1]) / "held.parquet"
        )
        sys.stdout.write(json.dumps(found))
    else:
        serve(prepare)
