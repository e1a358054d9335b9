"""Export to a model repository of NVIDIA's Triton Inference Server (Python or vLLM back end).

    REPOSITORY/NAME/config.pbtxt
                    VERSION/model.py with its neighbours, or model.json
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

Kind = Literal["python", "python-stream", "vllm"]
CONFIG = "config.pbtxt"
# Only the server can import them.
PYTHON_FILES = {
    "model.py": "triton_model.py",
    "triton_rows.py": "triton_rows.py",
    "triton_streams.py": "triton_streams.py",
}
MAX_BATCH = 16  # prompts that are answered at a time; more prompts wait
QUEUE_DELAY_US = 5_000  # how long a batch's first prompt waits for others; a token takes longer

_PYTHON = """\
name: {name}
backend: "python"
max_batch_size: {max_batch}
input [
  {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true }}{stream}
]
output [
  {{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }}
]
{policy}
instance_group [ {{ count: 1 kind: KIND_AUTO }} ]
version_policy {{ latest {{ num_versions: 1 }} }}
# The weights' dtype in memory, such as bfloat16; "auto" keeps the registered dtype.
parameters {{ key: "dtype" value {{ string_value: "auto" }} }}
"""
_STREAM = """,
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }"""
_BATCHING = f"dynamic_batching {{ max_queue_delay_microseconds: {QUEUE_DELAY_US} }}"
_DECOUPLED = "model_transaction_policy { decoupled: true }"
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
    kind: Kind,
    served_from: Path | None = None,
) -> Path:
    """Add a version to a model repository; a server never sees an incomplete version.

    Args:
        source: A registered folder.
        repository: Created if missing; may hold other models and versions.
        name: The registered model's name.
        version: The registered version's number, also used by Triton.
        kind: `python` answers with transformers, and `python-stream` can stream, but then the
            server takes no plain `infer` requests by HTTP; `vllm` answers with vLLM's engine.
        served_from: The repository's path on the server, which only vLLM needs; by default the
            path on this machine.

    Returns:
        The version's folder.

    Raises:
        UserError: The version exists already, the model exists as another kind, or the
            source is not a valid model.
    """
    model = repository.absolute() / triton_name(name)
    _check_kind(model / CONFIG, kind)
    place = model / str(version)
    # A server that polls skips hidden folders of the repository, but loads a model anew after any
    # change in the model's own folder.
    with new_folder(place, made_in=repository.absolute()) as folder:
        (folder / "model").mkdir()
        export_whole(source, folder / "model")
        if kind != "vllm":
            for name_there, name_here in PYTHON_FILES.items():
                shutil.copyfile(Path(__file__).with_name(name_here), folder / name_there)
            # A file, so that Python writes no bytecode here, which is such a change as well.
            (folder / "__pycache__").touch()
        else:
            base = served_from / place.relative_to(repository.absolute()) if served_from else place
            write_json(folder / "model.json", {"model": str(base / "model"), "dtype": "bfloat16"})
        if not (model / CONFIG).is_file():  # keep settings that a user tuned
            write_text(model / CONFIG, config_text(triton_name(name), kind))
    return place


def config_text(name: str, kind: Kind) -> str:
    """Return the text of a model's `config.pbtxt`."""
    quoted = json.dumps(name)
    if kind == "vllm":
        return _VLLM.format(name=quoted)
    stream, policy = (_STREAM, _DECOUPLED) if kind == "python-stream" else ("", _BATCHING)
    return _PYTHON.format(name=quoted, max_batch=MAX_BATCH, stream=stream, policy=policy)


def _check_kind(config: Path, kind: Kind) -> None:
    if not config.is_file():
        return
    text = config.read_text(encoding="utf-8")
    backend = re.search(r'^backend:\s*"([^"]*)"', text, re.MULTILINE)
    found = backend[1] if backend else "unknown"
    if found == "python" and re.search(r"^[^#\n]*\bdecoupled:\s*true", text, re.MULTILINE):
        found = "python-stream"
    if found != kind:
        raise UserError(
            f"{config}: the model there is of the kind {found}, not {kind}; use another "
            "repository, or remove that model"
        )
