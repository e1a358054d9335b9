"""The model file of an export run as Triton runs it, with a stand-in for the server."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from tests.unit.export import triton_stand_in


def read_config(path: Path) -> Any:
    """Parsed by Triton's own schema, which refuses a field that it doesn't know."""
    return text_format.Parse(path.read_text(), ModelConfig())


def start(version: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model as the server makes it: its file alone, and the config as JSON."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton_stand_in.module())
    monkeypatch.syspath_prepend(version)
    for neighbour in ("triton_rows", "triton_streams"):
        monkeypatch.delitem(sys.modules, neighbour, raising=False)
    spec = importlib.util.spec_from_file_location("model", version / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "model", module)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    config = json_format.MessageToJson(
        read_config(version.parent / "config.pbtxt"), preserving_proto_field_name=True
    )
    kind = {"model_instance_kind": "CPU", "model_instance_device_id": "0"}
    model.initialize({"model_config": config, **kind})
    return model


def request(
    texts: list[str], max_tokens: list[int] | None = None, stream: bool | None = None
) -> Any:
    texts_B1 = np.array([[text.encode()] for text in texts], dtype=object)
    inputs = [triton_stand_in.Tensor("text_input", texts_B1)]
    if max_tokens is not None:
        numbers_B1 = np.array(max_tokens, np.int32)[:, None]
        inputs.append(triton_stand_in.Tensor("max_tokens", numbers_B1))
    if stream is not None:
        inputs.append(triton_stand_in.Tensor("stream", np.array([[stream]] * len(texts))))
    return triton_stand_in.InferenceRequest(inputs)


def texts(response: Any) -> list[str]:
    assert response.error() is None
    (tensor,) = response.output_tensors()
    assert tensor.name() == "text_output"
    assert tensor.as_numpy().shape[1:] == (1,)
    return [text.decode() for text in tensor.as_numpy().flatten()]


@torch.inference_mode()
def greedy(folder: Path, prompt: str, tokens: int) -> str:
    """transformers' own, one prompt at a time and without padding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
