"""Export of a model as one graph for runtimes without transformers: torch.export or ONNX.

The graph maps token ids [B, S] to logits [B, S, V], for any B and any S up to the context. Shorter
rows are padded on the right, where causality hides the padding. The graph has no cache of keys and
values: it is for scoring and for other runtimes' tools, not for fast generation.

The written graph is loaded again and compared with the model on a shape not used for tracing.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from pipelines.export.source import check_whole, companion_files
from pipelines.models.model_folder import load_config
from pipelines.models.served import PLAIN

Kind = Literal["torch-export", "onnx"]
FILES: dict[Kind, str] = {"torch-export": "model.pt2", "onnx": "model.onnx"}
INPUT, OUTPUT = "input_ids", "logits"
BATCH, SEQUENCE = "batch", "sequence"
TOLERANCE = 1e-3  # absolute for a logit up to 1, relative to its size above 1


class ProgramError(Exception):
    """The written graph's results differ from the model's: a defect in a library or in Penstock."""


def export_program(source: Path, folder: Path, kind: Kind) -> float:
    """Write the graph in fp32, with tokenizer and model card beside it.

    A `.pt2` is a zip of JSON and raw tensors. The sample inputs are removed, since torch would
    pickle them. ONNX keeps its weights beside the graph, in `model.onnx.data`.

    Args:
        source: A registered folder.
        folder: An existing folder that receives the files.
        kind: The format to write.

    Returns:
        The largest difference of a logit from the model's.

    Raises:
        UserError: See `source.check_whole`.
        ProgramError: The graph's logits differ from the model's.
    """
    from transformers import AutoModelForCausalLM

    check_whole(source)
    config = load_config(source)
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **PLAIN)
    model = _Logits(loaded).eval()
    program = _trace(model, config.context_length)
    path = folder / FILES[kind]
    if kind == "onnx":
        _write_onnx(program, path)
    else:
        torch.export.save(program, path)
    for each in companion_files(source):
        shutil.copyfile(each, folder / each.name)
    return _compare(model, load_program(path), config.vocab_size, min(11, config.context_length))


def load_program(path: Path) -> Callable[[Tensor], Tensor]:
    """Return a written graph as a function of ids [B, S] on the CPU; ONNX runs in onnxruntime."""
    if path.suffix != ".onnx":
        module: Callable[[Tensor], Tensor] = torch.export.load(path).module()
        return module
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda ids: torch.from_numpy(session.run([OUTPUT], {INPUT: ids.numpy()})[0])


class _Logits(nn.Module):
    """A module that maps only ids to only logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


@torch.no_grad()
def _trace(model: nn.Module, context: int) -> ExportedProgram:
    shape = {0: Dim(BATCH), 1: Dim(SEQUENCE, max=context)}
    ids_BS = torch.zeros((2, min(7, context)), dtype=torch.int64)  # noqa: N806
    # Strict mode fails, since dynamo cannot trace all of transformers' code.
    program: ExportedProgram = torch.export.export(
        model, (ids_BS,), dynamic_shapes={INPUT: shape}, strict=False
    )
    program = program.run_decompositions({})
    program.example_inputs = None  # torch pickles them
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # it contains this machine's paths
    return program


def _write_onnx(program: ExportedProgram, path: Path) -> None:
    import onnx

    made = torch.onnx.export(
        program,
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes={INPUT: {0: BATCH, 1: SEQUENCE}},
        dynamo=True,
        verbose=False,
    )
    if made is None:
        raise ProgramError(f"{path}: torch made no ONNX program")
    made.save(path, external_data=True)
    onnx.checker.check_model(path)


@torch.no_grad()
def _compare(
    model: nn.Module, written: Callable[[Tensor], Tensor], vocabulary: int, length: int
) -> float:
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(0, vocabulary, (3, length), generator=generator)  # noqa: N806
    expected = model(ids_BS)
    difference = (written(ids_BS) - expected).abs()
    if not bool((difference <= TOLERANCE * expected.abs().clamp(min=1)).all()):
        raise ProgramError(
            f"the graph's logits are off by {difference.max():.3g} from the model's; the "
            f"tolerance is {TOLERANCE}"
        )
    return float(difference.max())
