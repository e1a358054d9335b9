"""Ours: a form of a folder is written, and measured if it is small, by a new process a round.

So importing torch, transformers and torchao is in the small one's time, as it is for a user's
command. Of the large one only the writing counts, which is a rate and so needs a process that has
imported all: it writes the small one first.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.contender import Round, serve

if TYPE_CHECKING:
    from pipelines.run.progress import ProgressMeter


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    def run_round() -> tuple[float, dict[str, Any]]:
        source = folder / options["model"]
        command = [sys.executable, "-m", __spec__.name, str(source), options["form"], "measure"]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        return 1, json.loads(said)

    return run_round


def measure(source: Path, form: Any) -> dict[str, float]:
    """The written form's size, the most memory that this process held, and a small one's score."""
    from pipelines.export.variants import write_variant
    from pipelines.models.model_folder import weight_files
    from pipelines.models.safetensors_files import weight_bytes
    from pipelines.run.progress import meter_on_stderr

    meter = meter_on_stderr(form)
    large = source.name == "large"
    with tempfile.TemporaryDirectory() as name:
        first, to = Path(name, "first"), Path(name, "to")
        first.mkdir()
        to.mkdir()
        if large:
            write_variant(source.with_name("small"), first, form, group=128)
        began = time.perf_counter()
        write_variant(source, to, form, group=128)
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found = {"weight bytes": weight_bytes(weight_files(to)), "peak bytes": peak}
        return found | ({"seconds": seconds} if large else _score(source, to, meter))


def _score(source: Path, written: Path, meter: "ProgressMeter") -> dict[str, float]:
    import pyarrow.parquet as pq

    from pipelines.evaluation.perplexity import STRIDE
    from pipelines.stages.held_out import HeldOut, score_export

    held_out = HeldOut(pq.read_table(source.with_name("held.parquet")), 0.0, STRIDE)
    return {"bits per byte": score_export(written, held_out, meter)}


if __name__ == "__main__":
    if sys.argv[-1] == "measure":
        sys.stdout.write(json.dumps(measure(Path(sys.argv[1]), sys.argv[2])))
    else:
        serve(prepare)
