"""Formulas against the bytes that transformers really holds."""

import pytest
import torch

from pipelines.models.presets import preset
from pipelines.planning.serving_plan import kv_cache_bytes, serving_memory
from tests.unit.export.models import CONTEXT, small, write_registered


@pytest.mark.parametrize(
    "name", ["llama-100k", "gpt2-124m", "qwen3-0.6b", "gemma3-1b", "gpt-oss-20b"]
)
@torch.no_grad()
def test_keys_and_values_are_what_a_cache_holds(name, tmp_path):
    from transformers import AutoModelForCausalLM

    model = small(name, kv_heads=2 if name != "gpt2-124m" else 4)
    write_registered(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cache = theirs(torch.zeros((3, CONTEXT), dtype=torch.int64), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert kv_cache_bytes(model.config, 3, CONTEXT) == held


def test_the_published_figure_of_llama_2():
    """Half a MiB a token: 2 x 32 layers x 4096 x 2 bytes."""
    assert kv_cache_bytes(preset("llama2-7b"), 1, 1) == 2**19


def test_a_sliding_window_keeps_no_more_than_itself():
    config = preset("mistral-7b")
    assert config.sliding_window is not None
    longest = kv_cache_bytes(config, 1, 10 * config.sliding_window)
    assert longest == kv_cache_bytes(config, 1, config.sliding_window)


def test_the_whole_is_its_parts():
    config = preset("llama2-7b").sized(32_000, 4096)
    memory = serving_memory(config, 10, 8, 4096)
    assert memory.weights == 10
    assert memory.total == 10 + memory.kv_cache + memory.activations
    assert memory.activations < 0.5e9
    assert serving_memory(config, 10, 8, 8192).activations == memory.activations  # cut into pieces
