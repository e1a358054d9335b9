"""Quantised folders load in plain transformers, and are what is scored."""

import json
import threading
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from pipelines.core.errors import UserError
from pipelines.core.storage import folder_hash
from pipelines.evaluation.bootstrap import bits_per_byte
from pipelines.evaluation.perplexity import score_documents
from pipelines.export.hf_folder import export_bf16
from pipelines.export.quantized import encode_int4, encode_int8, export_quantized
from pipelines.models import pretrained, served
from pipelines.models.served import decode_int4, load_quantized
from tests.unit.export.models import PROMPTS, small, tokens, write_registered

CPU = torch.device("cpu")
aten = torch.ops.aten
DOCUMENTS = pa.table({"doc_id": [f"{n}" for n in range(4)], "text": [p * 9 for p in PROMPTS]})


@torch.no_grad()
def test_int8_loads_in_plain_transformers_and_loses_little(registered: Path, made: Path) -> None:
    from torchao.quantization import Int8Tensor
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_quantized(registered, made, 8)
    model = AutoModelForCausalLM.from_pretrained(made)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, Int8Tensor)
    assert AutoTokenizer.from_pretrained(made)("def").input_ids == list(b"def")
    logits = model(tokens()).logits
    assert torch.equal(logits, load_quantized(made, CPU)(tokens()).logits)
    expected = AutoModelForCausalLM.from_pretrained(registered)(tokens()).logits
    error = (logits.float() - expected).norm() / expected.norm()
    assert 0 < error < 0.1


@torch.no_grad()
def test_int4_loads_in_plain_transformers_and_is_computed_as_written(
    registered: Path, made: Path
) -> None:
    from torchao.quantization import Int4Tensor
    from transformers import AutoModelForCausalLM

    export_quantized(registered, made, 4, group=32)
    kept = AutoModelForCausalLM.from_pretrained(made).model.layers[1].mlp.down_proj.weight
    assert isinstance(kept, Int4Tensor)
    ours = load_quantized(made, CPU)
    assert torch.equal(ours.model.layers[1].mlp.down_proj.weight, decode_int4(kept))
    rounded = AutoModelForCausalLM.from_pretrained(registered, dtype=torch.bfloat16)
    for name, parameter in rounded.named_parameters():
        if name.endswith("proj.weight"):
            parameter.copy_(decode_int4(encode_int4(parameter, 32)))
    assert torch.equal(ours(tokens()).logits, rounded(tokens()).logits)


@pytest.mark.parametrize("group", [32, 128])
def test_int4_codes_mean_what_torchao_reads(group: int) -> None:
    """By its own decoder, written for the format of its GPU kernels."""
    from torchao.prototype.gptq.api import _int4_row_dequantize_zp

    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))
    weight[3, :group] = 0.5  # a group of one value
    packed = encode_int4(weight, group)
    codes = torch.stack([(packed.qdata << 4) >> 4, packed.qdata >> 4], -1).flatten(1)
    assert (codes.min(), codes.max()) == (-8, 7)
    scales = packed.scale.float(), packed.zero_point.float()
    theirs = _int4_row_dequantize_zp(codes, *scales, group)
    ours = decode_int4(packed)
    torch.testing.assert_close(ours.float(), theirs, rtol=2**-8, atol=1e-6)
    step = packed.scale.t().float().repeat_interleave(group, dim=1)
    # Half a step, and what the rounding of scale and zero to 8 bits shifts the ends by.
    assert ((ours.float() - weight).abs() <= 0.55 * step + 0.02).all()


def test_int4_errors_are_no_larger_than_of_torchaos_own_rule() -> None:
    from torchao.quantization.quant_primitives import (
        MappingType,
        _choose_qparams_affine_tinygemm,
        _dequantize_affine_tinygemm,
        _quantize_affine_tinygemm,
    )

    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    block = (1, 64)
    scale, zero = _choose_qparams_affine_tinygemm(
        weight, MappingType.ASYMMETRIC, block, torch.int32, 0, 15, 1e-6
    )
    codes = _quantize_affine_tinygemm(weight, block, scale, zero, torch.int32, 0, 15)
    theirs = _dequantize_affine_tinygemm(codes, block, scale, zero, torch.int32, 0, 15)
    ours = decode_int4(encode_int4(weight, 64))
    assert (ours - weight).float().norm() <= 1.01 * (theirs - weight).float().norm()


def test_sizes_are_those_of_the_formats(registered: Path, tmp_path: Path) -> None:
    sizes = {}
    for name, bits in {"int8": 8, "int4": 4}.items():
        (tmp_path / name).mkdir()
        export_quantized(registered, tmp_path / name, bits, group=32)
        with safe_open(tmp_path / name / "model.safetensors", "pt") as file:
            sizes[name] = {key: file.get_tensor(key).nbytes for key in file.keys()}  # noqa: SIM118
    prefix = "model.layers.0.mlp.up_proj._weight_"
    inputs, outputs = 64, 128
    assert sizes["int8"][f"{prefix}qdata"] == inputs * outputs
    assert sizes["int4"][f"{prefix}qdata"] == inputs * outputs / 2
    assert sizes["int4"][f"{prefix}scale"] == 2 * outputs * inputs / 32
    assert sizes["int8"]["model.embed_tokens.weight"] == 2 * 257 * inputs


@pytest.mark.parametrize("bits", [8, 4])
def test_the_same_model_gives_the_same_bytes(bits: int, registered: Path, tmp_path: Path) -> None:
    hashes = set()
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        export_quantized(registered, folder, bits, group=64)
        hashes.add(folder_hash(folder))
    assert len(hashes) == 1
    files = {path.name for path in folder.iterdir()}
    assert files == {path.name for path in registered.iterdir()} - {"MLmodel"}
    assert not [path for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pkl")]


@pytest.mark.parametrize(
    "name", ["pythia-160m", "gpt-j-6b", "qwen3-0.6b", "mistral-7b", "phi3-mini-4k", "gemma3-1b"]
)
@pytest.mark.parametrize("bits", [8, 4])
def test_models_of_other_families(name: str, bits: int, tmp_path: Path, made: Path) -> None:
    source = write_registered(small(name), tmp_path / "source")
    export_quantized(source, made, bits, group=32)
    scores = bits_per_byte(score_documents(made, DOCUMENTS))
    assert scores == pytest.approx(bits_per_byte(score_documents(source, DOCUMENTS)), rel=0.1)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_model_in_several_files_is_that_in_one(
    bits: int, registered: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "FILE_BYTES", 60_000)
    several = write_registered(small(), tmp_path / "several")
    assert len(list(several.glob("*.safetensors"))) > 2
    (tmp_path / "to").mkdir()
    export_quantized(registered, made, bits, group=32)
    export_quantized(several, tmp_path / "to", bits, group=32)
    logits = [load_quantized(folder, CPU)(tokens()).logits for folder in (made, tmp_path / "to")]
    assert torch.equal(*logits)


def test_what_is_scored_is_the_quantised_model(registered: Path, tmp_path: Path) -> None:
    ours = bits_per_byte(score_documents(registered, DOCUMENTS))
    scores = {}
    for bits in (16, 8, 4):
        folder = tmp_path / str(bits)
        folder.mkdir()
        if bits == 16:
            export_bf16(registered, folder)
        else:
            export_quantized(registered, folder, bits, group=32)
        scores[bits] = abs(bits_per_byte(score_documents(folder, DOCUMENTS)) - ours)
    assert 0 < scores[16] < 0.05
    assert scores[8] < scores[4]


class HalfProducts(TorchDispatchMode):
    """Counts the matrix products of bfloat16 in this thread."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        product = func.overloadpacket in (aten.mm, aten.addmm, aten.linear)
        if product and any(getattr(each, "dtype", None) == torch.bfloat16 for each in args):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_cpu_without_units_for_half_precision_scores_with_fp32_products(
    bits: int, registered: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16's are ten times slower there; the scores are those of the served tensors."""
    export_quantized(registered, made, bits, group=32)
    found = {}
    for units in (True, False):
        monkeypatch.setattr(served, "has_bfloat16_products", lambda units=units: units)
        served.let_go()
        with HalfProducts() as products:
            scores = score_documents(made, DOCUMENTS)
        assert (products.count > 0) is units
        found[units] = scores["nats"].to_pylist()
    served.let_go()
    assert found[False] == pytest.approx(found[True], rel=2e-3)


def test_any_number_of_threads_scores_alike(
    registered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where several take batches beside each other; the machine's own number is given back."""
    from pipelines.evaluation import perplexity

    documents = pa.concat_tables([DOCUMENTS] * 20)
    seen, before = set(), torch.get_num_threads()
    scored = perplexity._window_nats

    def noted(*given, **named):
        seen.add((threading.get_ident(), torch.get_num_threads()))
        return scored(*given, **named)

    torch.set_num_threads(1)
    try:
        expected = score_documents(registered, documents)["nats"].to_pylist()
        torch.set_num_threads(3)
        monkeypatch.setattr(perplexity, "_window_nats", noted)
        found = score_documents(registered, documents)["nats"].to_pylist()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert {threads for _, threads in seen} == {1}
    assert threading.get_ident() not in {thread for thread, _ in seen}
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_long_context_is_scored_alike(registered: Path) -> None:
    """Where one window has more logits than a batch may, and the model returns the loss itself."""
    from pipelines.evaluation import perplexity

    expected = score_documents(registered, DOCUMENTS)["nats"].to_pylist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(perplexity, "_LOGITS", 10 * 257)
        found = score_documents(registered, DOCUMENTS)["nats"].to_pylist()
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("group", "line"),
    [
        (48, "--group-size 48: it must be one of 32, 64, 128, 256"),
        (128, "groups of 128 weights don't divide the 96 inputs of .*; groups of 32 do"),
    ],
)
def test_a_group_that_does_not_divide_is_one_line(
    group: int, line: str, tmp_path: Path, made: Path
) -> None:
    source = write_registered(small(width=96), tmp_path / "source")
    with pytest.raises(UserError, match=line):
        export_quantized(source, made, 4, group)
    assert list(made.iterdir()) == []


def test_no_group_fits(tmp_path: Path, made: Path) -> None:
    source = write_registered(small(width=48), tmp_path / "source")
    with pytest.raises(UserError, match="no group size does; use int8"):
        export_quantized(source, made, 4, 32)


def test_a_gpt2_has_nothing_to_quantise(tmp_path: Path, made: Path) -> None:
    source = write_registered(small("gpt2-124m"), tmp_path / "source")
    with pytest.raises(UserError, match="gpt2 of transformers has no linear layers"):
        export_quantized(source, made, 8)


def test_the_config_says_how(registered: Path, made: Path) -> None:
    export_quantized(registered, made, 4, group=64)
    config = json.loads((made / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "torchao"
    assert config["quant_type"]["default"]["_data"]["group_size"] == 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-9, 0.02, 30])
def test_int8_codes_are_torchaos_to_the_bit(size: float, dtype: torch.dtype) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(700, 2048, generator=generator) * size).to(dtype)
    weight[0], weight[1], weight[2] = 0, -weight[1].abs(), weight[2].abs()
    weight[3, 1] = 1e4
    layer = torch.nn.Linear(2048, 700, bias=False, dtype=dtype)
    layer.weight.data = weight.clone()
    quantize_(layer, Int8WeightOnlyConfig(set_inductor_config=False))
    ours, theirs = encode_int8(weight), layer.weight
    for part in ("qdata", "scale", "zero_point"):
        assert torch.equal(getattr(ours, part), getattr(theirs, part))
    assert (ours.block_size, ours.dtype) == (theirs.block_size, theirs.dtype)
