"""Export to a model repository of NVIDIA's Triton Inference Server (Python or vLLM back end).

    REPOSITORY/NAME/config.pbtxt
                    VERSION/model.py or model.json
                            model/      the Hugging Face folder

Triton's version number is the registry's, and Triton serves the newest version in the repository. A
new version is added beside the older ones; the server switches to it when it polls or is told to
load.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Literal

from pipelines.core.errors import UserError
from pipelines.core.storage import write_json, write_text
from pipelines.export.hf_folder import export_whole
from pipelines.export.source import new_folder

Backend = Literal["python", "vllm"]
CONFIG = "config.pbtxt"
MODEL_FILE = Path(__file__).with_name("triton_model.py")  # only the server can import it
MAX_BATCH = 16  # prompts of a batch; more prompts wait for the next batch
QUEUE_DELAY_US = 5_000  # how long a batch's first prompt waits for others; a token takes longer

_PYTHON = """\
name: {name}
backend: "python"
max_batch_size: {max_batch}
input [
  {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true }}
]
output [
  {{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }}
]
dynamic_batching {{ max_queue_delay_microseconds: {delay} }}
instance_group [ {{ count: 1 kind: KIND_AUTO }} ]
version_policy {{ latest {{ num_versions: 1 }} }}
# The weights' dtype in memory, such as bfloat16; "auto" keeps the registered dtype.
parameters {{ key: "dtype" value {{ string_value: "auto" }} }}
"""
# The vLLM back end itself defines batches, inputs and outputs.
_VLLM = """\
name: {name}
backend: "vllm"
instance_group [ {{ count: 1 kind: KIND_MODEL }} ]
version_policy {{ latest {{ num_versions: 1 }} }}
"""


def triton_name(name: str) -> str:
    """Return a registered model's name in Triton, valid as a folder's name and in a URL."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name).lstrip(".")


def export_triton(
    source: Path,
    repository: Path,
    name: str,
    version: int,
    backend: Backend,
    served_from: Path | None = None,
) -> Path:
    """Add a version to a model repository; a server never sees an incomplete version.

    Args:
        source: A registered folder.
        repository: Created if missing; may hold other models and versions.
        name: The registered model's name.
        version: The registered version's number, also used by Triton.
        backend: `python` answers with transformers, `vllm` with vLLM's engine.
        served_from: The repository's path on the server, which only vLLM needs; by default the
            path on this machine.

    Returns:
        The version's folder.

    Raises:
        UserError: The version exists already, the model exists with another back end, or the
            source is not a valid model.
    """
    model = repository.absolute() / triton_name(name)
    _check_backend(model / CONFIG, backend)
    place = model / str(version)
    # A server that polls skips hidden folders of the repository, but loads a model anew after any
    # change in the model's own folder.
    with new_folder(place, made_in=repository.absolute()) as folder:
        (folder / "model").mkdir()
        export_whole(source, folder / "model")
        if backend == "python":
            shutil.copyfile(MODEL_FILE, folder / "model.py")
            # A file, so that Python writes no bytecode here, which is such a change as well.
            (folder / "__pycache__").touch()
        else:
            base = served_from / place.relative_to(repository.absolute()) if served_from else place
            write_json(folder / "model.json", {"model": str(base / "model"), "dtype": "bfloat16"})
        if not (model / CONFIG).is_file():  # keep settings that a user tuned
            write_text(model / CONFIG, config_text(triton_name(name), backend))
    return place


def config_text(name: str, backend: Backend) -> str:
    """Return the text of a model's `config.pbtxt`."""
    template = _PYTHON if backend == "python" else _VLLM
    return template.format(name=json.dumps(name), max_batch=MAX_BATCH, delay=QUEUE_DELAY_US)


def _check_backend(config: Path, backend: Backend) -> None:
    if not config.is_file():
        return
    found = re.search(r'^backend:\s*"([^"]*)"', config.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None or found[1] != backend:
        kind = found[1] if found else "unknown"
        raise UserError(
            f"{config}: the back end is {kind}, not {backend}; use another repository, or remove "
            "that model"
        )
