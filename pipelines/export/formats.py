"""The formats in which `penstock models export` writes a model; no torch here."""

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.export.gguf_file import Weights
    from pipelines.export.program import Kind
    from pipelines.export.triton_server import Kind as TritonKind


class Format(StrEnum):
    """The values of the option `--format`."""

    HUGGINGFACE = "huggingface"
    BF16 = "bf16"
    PEFT = "peft"
    INT8 = "int8"
    INT4 = "int4"
    VLLM_INT4 = "vllm-int4"
    TRITON = "triton"
    TRITON_STREAM = "triton-stream"
    TRITON_VLLM = "triton-vllm"
    ONNX = "onnx"
    TORCH_EXPORT = "torch-export"
    GGUF = "gguf"
    GGUF_F16 = "gguf-f16"
    GGUF_Q8_0 = "gguf-q8_0"


TRITON: dict[str, "TritonKind"] = {
    Format.TRITON: "python",
    Format.TRITON_STREAM: "python-stream",
    Format.TRITON_VLLM: "vllm",
}
PROGRAM: dict[str, "Kind"] = {Format.ONNX: "onnx", Format.TORCH_EXPORT: "torch-export"}
GGUF: dict[str, "Weights"] = {
    Format.GGUF: "own",
    Format.GGUF_F16: "f16",
    Format.GGUF_Q8_0: "q8_0",
}
VLLM_LOADS = (Format.HUGGINGFACE, Format.BF16, Format.INT8, Format.INT4, Format.VLLM_INT4)
