"""A GGUF file's names, shapes, values and metadata, read back with its own library."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, TokenType, dequantize
from safetensors.torch import load_file
from torch import Tensor

from pipelines.core.errors import UserError
from pipelines.core.storage import write_json
from pipelines.data.tokens.tokenizer import (
    TOKENIZER_FILE,
    Encoder,
    character_tokenizer,
    save_tokenizer,
    train_bpe,
)
from pipelines.export.gguf_file import FILE, export_gguf, write_rounded
from pipelines.models.config import RopeScaling
from pipelines.models.pretrained import load_pretrained, save_pretrained
from pipelines.models.transformer import Transformer
from tests.serving.models import SHAPES, write_registered
from tests.unit.export import models

HEADS, WIDTH, HEAD = 8, 256, 32


class Written:
    """The tensors of a file as numbers, and its metadata."""

    def __init__(self, folder: Path) -> None:
        self.reader = GGUFReader(folder / FILE)
        self.types = {each.name: each.tensor_type.name for each in self.reader.tensors}
        self.tensors = {
            each.name: torch.from_numpy(dequantize(each.data, each.tensor_type).copy()).view(
                *reversed([int(size) for size in each.shape])
            )
            for each in self.reader.tensors
        }

    def __getitem__(self, key: str) -> object:
        return self.reader.fields[key].contents()


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return {shape: write_registered(shape, "plain", folder).folder for shape in SHAPES}


def exported(source: Path, made: Path, weights: str = "own") -> tuple[Written, dict[str, Tensor]]:
    export_gguf(source, made, weights, "m@1")
    return Written(made), load_file(source / "model.safetensors")


def neighbours(x: Tensor, head: int) -> Tensor:
    """Rows of heads in llama.cpp's order: 0, R/2, 1, R/2 + 1 and so on."""
    order = [first + half for first in range(head // 2) for half in (0, head // 2)]
    return torch.cat([part[order] for part in x.split(head)])


@pytest.mark.parametrize("shape", ["llama2", "llama3", "mistral"])
def test_llamas_queries_and_keys_are_reordered_and_nothing_else(shape, sources, made):
    written, ours = exported(sources[shape], made)
    assert written["general.architecture"] == "llama"
    for number in range(2):
        layer, block = f"model.layers.{number}.", f"blk.{number}."
        for name in ("q", "k"):
            stored = ours[f"{layer}self_attn.{name}_proj.weight"]
            found = written.tensors[f"{block}attn_{name}.weight"]
            assert torch.equal(found, neighbours(stored, HEAD))
            assert not torch.equal(found, stored)
        for name, theirs in {
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
        }.items():
            found = written.tensors[f"{block}{theirs}.weight"]
            assert torch.equal(found, ours[f"{layer}{name}.weight"])
    assert torch.equal(written.tensors["token_embd.weight"], ours["model.embed_tokens.weight"])
    assert torch.equal(written.tensors["output_norm.weight"], ours["model.norm.weight"])
    assert ("output.weight" in written.tensors) == ("lm_head.weight" in ours)
    assert len(written.tensors) == len(ours) + (shape == "llama3")
    assert set(written.types.values()) == {"F32"}


def test_llama3s_scaled_positions_are_divisors_of_the_plain_ones(sources, made):
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    written, _ = exported(sources["llama3"], made)
    config = AutoConfig.from_pretrained(sources["llama3"])
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = written["llama.rope.freq_base"] ** (-torch.arange(0, HEAD, 2) / HEAD)
    torch.testing.assert_close(plain / written.tensors["rope_freqs.weight"], theirs)


def test_phi3s_fused_tensors_stay_as_they_are(sources, made):
    written, ours = exported(sources["phi3"], made)
    layer = "model.layers.1."
    for name, theirs in {
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }.items():
        assert torch.equal(written.tensors[f"blk.1.{theirs}.weight"], ours[f"{layer}{name}.weight"])
    assert len(written.tensors) == len(ours)
    assert written["phi3.rope.dimension_count"] == HEAD


def test_gemma3s_norms_are_what_is_multiplied_by_under_llama_cpps_names(sources, made):
    written, ours = exported(sources["gemma3"], made)
    for name, theirs in {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
    }.items():
        found = written.tensors[f"blk.0.{theirs}.weight"]
        assert torch.equal(found, 1 + ours[f"model.layers.0.{name}.weight"])
    assert len(written.tensors) == len(ours)
    assert written["gemma3.attention.sliding_window"] == 24
    assert written["gemma3.attention.sliding_window_pattern"] == 2
    assert written["gemma3.rope.freq_base"] == 1e6
    assert written["gemma3.rope.freq_base_swa"] == 5000
    assert written["gemma3.context_length"] == 128


@pytest.mark.parametrize("shape", ["qwen2", "qwen3"])
def test_qwens_tensors_stay_as_they_are(shape, sources, made):
    written, ours = exported(sources[shape], made)
    assert torch.equal(
        written.tensors["blk.1.attn_q.weight"], ours["model.layers.1.self_attn.q_proj.weight"]
    )
    extra = "attn_q.bias" if shape == "qwen2" else "attn_q_norm.weight"
    stored = "q_proj.bias" if shape == "qwen2" else "q_norm.weight"
    found = written.tensors[f"blk.1.{extra}"]
    assert torch.equal(found, ours[f"model.layers.1.self_attn.{stored}"])
    assert ("output.weight" in written.tensors) == (shape == "qwen3")
    assert written[f"{shape}.attention.key_length"] == (64 if shape == "qwen3" else HEAD)
    assert len(written.tensors) == len(ours)


def test_gpt2s_matrices_are_turned(sources, made):
    written, ours = exported(sources["gpt2"], made)
    for theirs, name in {
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    }.items():
        found = written.tensors[f"blk.1.{theirs}.weight"]
        assert torch.equal(found, ours[f"transformer.h.1.{name}.weight"].T)
        bias = written.tensors[f"blk.1.{theirs}.bias"]
        assert torch.equal(bias, ours[f"transformer.h.1.{name}.bias"])
    assert torch.equal(written.tensors["position_embd.weight"], ours["transformer.wpe.weight"])
    assert "output.weight" not in written.tensors
    assert len(written.tensors) == len(ours)


def test_gpt_neoxs_heads_are_taken_apart(sources, made):
    written, ours = exported(sources["gpt_neox"], made)
    for kind in ("weight", "bias"):
        stored = ours[f"gpt_neox.layers.1.attention.query_key_value.{kind}"]
        found = written.tensors[f"blk.1.attn_qkv.{kind}"]
        for head in range(HEADS):
            for which in range(3):
                rows = stored[(3 * head + which) * HEAD :][:HEAD]
                assert torch.equal(found[which * WIDTH + head * HEAD :][:HEAD], rows)
    assert written["gptneox.rope.dimension_count"] == HEAD // 4
    assert written["gptneox.use_parallel_residual"] is True
    assert len(written.tensors) == len(ours)


def saved(config, folder: Path) -> Path:
    """A model of another shape with the byte tokenizer."""
    model = Transformer(replace(config, vocab_size=257))
    model.init_weights(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return models.write_registered(model, folder)


def test_biases_of_llama_are_reordered_too(tmp_path, made):
    biased = replace(SHAPES["llama3"], qkv_bias=True, output_bias=True, mlp_bias=True)
    written, ours = exported(saved(biased, tmp_path / "source"), made)
    stored = ours["model.layers.0.self_attn.k_proj.bias"]
    assert torch.equal(written.tensors["blk.0.attn_k.bias"], neighbours(stored, HEAD))
    for theirs, name in {"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj"}.items():
        bias = written.tensors[f"blk.0.{theirs}.bias"]
        assert torch.equal(bias, ours[f"model.layers.0.{name}.bias"])


def test_a_gpt_neox_has_the_biases_and_the_head_that_llama_cpp_demands(tmp_path, made):
    config = replace(SHAPES["gpt_neox"], qkv_bias=False, output_bias=False, tie_embeddings=True)
    written, ours = exported(saved(config, tmp_path / "source"), made)
    for name, size in {"attn_qkv": 3 * WIDTH, "attn_output": WIDTH}.items():
        assert torch.equal(written.tensors[f"blk.1.{name}.bias"], torch.zeros(size))
    assert torch.equal(written.tensors["output.weight"], ours["gpt_neox.embed_in.weight"])


def test_bf16_stays_bf16_and_vectors_are_fp32(tmp_path, sources, made):
    source = shutil.copytree(sources["qwen2"], tmp_path / "source")
    save_pretrained(load_pretrained(source).to(torch.bfloat16), source, 0)
    written, ours = exported(source, made)
    assert written["general.file_type"] == 32
    matrices = {name for name, tensor in written.tensors.items() if tensor.ndim == 2}
    assert {written.types[name] for name in matrices} == {"BF16"}
    assert {written.types[name] for name in written.types.keys() - matrices} == {"F32"}
    found = written.tensors["blk.0.ffn_up.weight"]
    assert torch.equal(found, ours["model.layers.0.mlp.up_proj.weight"].float())


@pytest.mark.parametrize(
    ("weights", "kind", "worst"), [("f16", "F16", 2**-11), ("q8_0", "Q8_0", 0.01)]
)
def test_what_is_measured_has_the_numbers_of_the_file(
    weights, kind, worst, sources, made, tmp_path
):
    written, ours = exported(sources["gpt2"], made, weights)
    assert {written.types[f"blk.0.{name}.weight"] for name in ("attn_qkv", "ffn_down")} == {kind}
    assert written.types["position_embd.weight"] == written.types["output_norm.bias"] == "F32"
    copy = tmp_path / "copy"
    copy.mkdir()
    write_rounded(sources["gpt2"], copy, weights)
    rounded = load_file(copy / "model.safetensors")
    for theirs, name in {
        "token_embd": "wte",
        "blk.1.attn_qkv": "h.1.attn.c_attn",
        "blk.1.ffn_down": "h.1.mlp.c_proj",
        "position_embd": "wpe",
    }.items():
        stored, found = ours[f"transformer.{name}.weight"], rounded[f"transformer.{name}.weight"]
        found_there = written.tensors[f"{theirs}.weight"]
        assert torch.equal(found if name in ("wte", "wpe") else found.T, found_there)
        assert (found - stored).abs().max() <= worst * stored.abs().max()
    assert Encoder(copy).end_id == Encoder(sources["gpt2"]).end_id


def test_rows_that_blocks_do_not_divide_stay_fp16(tmp_path, made):
    written, _ = exported(
        models.write_registered(models.small(width=48), tmp_path / "source"), made, "q8_0"
    )
    assert written.types["blk.0.ffn_up.weight"] == "F16"
    assert written.types["blk.0.ffn_down.weight"] == "Q8_0"


def test_a_context_beyond_the_window_is_cut_to_it(sources, made):
    assert export_gguf(sources["mistral"], made, "own", "m@1") == 24
    assert Written(made)["llama.context_length"] == 24


def test_the_tokenizer_is_in_the_file(tmp_path, made):
    chat = write_registered("llama2", "chat", tmp_path)
    shutil.copyfile(chat.folder / "README.md", chat.folder / "extra.json")
    (chat.folder / "extra.json").write_text("{}")
    written, _ = exported(chat.folder, made)
    assert (written["tokenizer.ggml.model"], written["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    definition = json.loads((chat.folder / TOKENIZER_FILE).read_text())
    tokens, types = written["tokenizer.ggml.tokens"], written["tokenizer.ggml.token_type"]
    for token, id_ in definition["model"]["vocab"].items():
        assert tokens[id_] == token
    special = {each["content"]: each["id"] for each in definition["added_tokens"]}
    assert list(special) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    for token, id_ in special.items():
        assert (tokens[id_], types[id_]) == (token, TokenType.CONTROL)
    assert len(tokens) == len(types) == load_pretrained(chat.folder).config.vocab_size
    known = set(definition["model"]["vocab"].values()) | set(special.values())
    for id_ in set(range(len(tokens))) - known:
        assert (tokens[id_], types[id_]) == (f"[PAD{id_}]", TokenType.UNUSED)
    merges = [" ".join(pair) for pair in definition["model"]["merges"]]
    assert written["tokenizer.ggml.merges"] == merges
    assert written["tokenizer.ggml.eos_token_id"] == special["<|endoftext|>"]
    assert written["tokenizer.ggml.add_bos_token"] is False
    template = (chat.folder / "chat_template.jinja").read_text()
    assert written["tokenizer.chat_template"] == template
    assert {path.name for path in made.iterdir()} == {FILE, "README.md", "lineage.json"}


def test_bytes_have_no_merges(registered, made):
    written, _ = exported(registered, made)
    assert written["tokenizer.ggml.merges"] == ["<none> <none>"]
    assert written["tokenizer.ggml.tokens"][256] == "<|endoftext|>"


@pytest.mark.parametrize(
    ("pattern", "ignore_merges", "name"),
    [
        ("GPT-4, Llama 3", True, "llama-bpe"),
        ("GPT-4, Llama 3", False, "dbrx"),
        ("Qwen 2", False, "qwen2"),
    ],
)
def test_a_pretrained_tokenizers_pattern_is_named(
    pattern, ignore_merges, name, tmp_path, sources, made
):
    source = shutil.copytree(sources["llama2"], tmp_path / "source")
    models.write_pretrained_tokenizer(pattern, ignore_merges, source)
    written, _ = exported(source, made)
    assert written["tokenizer.ggml.pre"] == name
    assert written["tokenizer.ggml.add_bos_token"] is ignore_merges
    assert written["tokenizer.ggml.bos_token_id"] == 0


def _spoil(change) -> object:
    def spoil(folder: Path) -> None:
        path = folder / TOKENIZER_FILE
        definition = json.loads(path.read_text())
        change(definition)
        write_json(path, definition)

    return spoil


def _unigram(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.Unigram([("<|endoftext|>", 0.0), ("a", -1.0)], 0, False))
    tokenizer.save(str(folder / TOKENIZER_FILE))


REFUSED_TOKENIZERS = {
    "characters": (
        lambda folder: save_tokenizer(character_tokenizer("abc"), folder),
        "no such tokenizer: not every byte has an id",
    ),
    "unigram": (_unigram, "no such tokenizer: the model is Unigram, not BPE"),
    "lower case": (
        _spoil(lambda it: it.update(normalizer={"type": "Lowercase"})),
        "no such tokenizer: text is normalised",
    ),
    "an unknown pattern": (
        _spoil(lambda it: it.update(pre_tokenizer={"type": "Whitespace"})),
        "no such tokenizer: text is cut in a way that is not known here",
    ),
    "whole words": (
        _spoil(lambda it: it["model"].update(ignore_merges=True)),
        "no such tokenizer: GPT-2's pattern with ignore_merges true",
    ),
    "spaces": (
        _spoil(lambda it: it["added_tokens"][0].update(lstrip=True)),
        "no such tokenizer: <|endoftext|> takes spaces beside it",
    ),
    "an end": (
        _spoil(
            lambda it: it.update(
                post_processor={"type": "BertProcessing", "sep": ["a", 5], "cls": ["b", 6]}
            )
        ),
        "llama.cpp adds only one token",
    ),
    "too many ids": (
        lambda folder: save_tokenizer(
            train_bpe([f"{n} {n * n} wheels turn" for n in range(999)], 400), folder
        ),
        "its largest id is 399, but the model has 320 rows",
    ),
}


@pytest.mark.parametrize("what", REFUSED_TOKENIZERS)
def test_a_tokenizer_that_llama_cpp_lacks_is_refused(what, sources, tmp_path, made):
    source = shutil.copytree(sources["llama2"], tmp_path / "source")
    spoil, line = REFUSED_TOKENIZERS[what]
    spoil(source)
    with pytest.raises(UserError, match=line.replace("|", r"\|")):
        export_gguf(source, made, "own", "m@1")
    assert list(made.iterdir()) == []


REFUSED = {
    "gptj": (SHAPES["gptj"], "llama.cpp cannot run models of the family gptj; use --format hugg"),
    "activation": (
        replace(SHAPES["llama2"], activation="gelu"),
        "llama models with the activation gelu",
    ),
    "scaled": (
        replace(SHAPES["qwen3"], rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)),
        "qwen3 models with scaled rotary positions",
    ),
    "biases": (
        replace(SHAPES["qwen3"], qkv_bias=True, output_bias=True),
        "qwen3 models with biases in attention",
    ),
    "scalar": (
        replace(SHAPES["gemma3"], query_pre_attn_scalar=50),
        "models with query_pre_attn_scalar = 50",
    ),
    "gemma's biases": (
        replace(SHAPES["gemma3"], qkv_bias=True, output_bias=True),
        "gemma3_text models with biases in attention",
    ),
    "heads": (replace(SHAPES["qwen2"], head_dim=64), "qwen2 models with heads of 64 features"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(what, tmp_path, made):
    config, line = REFUSED[what]
    with pytest.raises(UserError, match=line):
        export_gguf(saved(config, tmp_path / "source"), made, "own", "m@1")
    assert list(made.iterdir()) == []


def test_a_weight_too_large_for_fp16_is_one_line(tmp_path, made):
    model = models.small()
    model.layers["0"].mlp.up_proj.weight.data[0, 0] = 70_000.0
    source = models.write_registered(model, tmp_path / "source")
    with pytest.raises(UserError, match=r"blk\.0\.ffn_up\.weight: a weight is too large for fp16"):
        export_gguf(source, made, "f16", "m@1")


def test_the_file_is_the_same_each_time(registered, tmp_path):
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        export_gguf(registered, tmp_path / name, "q8_0", "m@1")
        found.append((tmp_path / name / FILE).read_bytes())
    assert found[0] == found[1]
