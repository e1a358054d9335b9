"""Decoder shapes by name; it imports no torch, so the CLI and the DAG can load it quickly."""

import difflib
from typing import Any

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig, RopeScaling, Yarn
from pipelines.models.families import find_family, flags

_LLAMA3: dict[str, Any] = {
    "kv_heads": 8,
    "vocab_size": 128_256,
    "context_length": 8192,
    "rope_theta": 500_000.0,
    "tie_embeddings": False,
}
_QWEN: dict[str, Any] = {
    "vocab_size": 151_936,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
    "tie_embeddings": True,
}
_MIXTRAL = flags("mixtral") | {"experts": 8, "experts_per_token": 2}
_GPT_OSS = flags("gpt_oss") | {"width": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64}
_GPT_OSS |= {"hidden": 2880, "experts_per_token": 4, "vocab_size": 201_088}
_GPT_OSS |= {"context_length": 131_072, "rope_scaling": Yarn(32.0, 4096, truncate=False)}


def _gpt2(layers: int, width: int, heads: int, context_length: int = 1024) -> DecoderConfig:
    return DecoderConfig(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        hidden=4 * width,
        vocab_size=50_257,
        context_length=context_length,
        **flags("gpt2"),
    )


def _gpt_neox(layers: int, width: int, heads: int, vocab_size: int) -> DecoderConfig:
    return DecoderConfig(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        hidden=4 * width,
        vocab_size=vocab_size,
        context_length=2048,
        rotary_fraction=0.25,
        **flags("gpt_neox"),
    )


# Penstock's own presets are named after their rough number of parameters with a vocabulary that
# suits the size. Published models have their published vocabulary and context until `sized`.
PRESETS: dict[str, DecoderConfig] = {
    "llama-100k": DecoderConfig(layers=2, width=64, heads=4, kv_heads=2, hidden=176),
    # It has as many parameters as nanoGPT's small setting for the same text.
    "shakespeare-char": DecoderConfig(layers=4, width=128, heads=4, kv_heads=4, hidden=336),
    "llama-700k": DecoderConfig(layers=2, width=128, heads=4, kv_heads=2, hidden=384),
    "llama-1m": DecoderConfig(layers=4, width=128, heads=4, kv_heads=2, hidden=384),
    "llama-3m": DecoderConfig(layers=6, width=192, heads=6, kv_heads=2, hidden=512),
    "llama-10m": DecoderConfig(layers=6, width=320, heads=10, kv_heads=5, hidden=896),
    "llama-1b": DecoderConfig(
        layers=16,
        width=2048,
        heads=16,
        kv_heads=8,
        hidden=8192,
        vocab_size=32_000,
        context_length=4096,
    ),
    "llama2-7b": DecoderConfig(
        layers=32,
        width=4096,
        heads=32,
        kv_heads=32,
        hidden=11_008,
        vocab_size=32_000,
        context_length=4096,
        tie_embeddings=False,
    ),
    "llama3-8b": DecoderConfig(layers=32, width=4096, heads=32, hidden=14_336, **_LLAMA3),
    "llama3-70b": DecoderConfig(layers=80, width=8192, heads=64, hidden=28_672, **_LLAMA3),
    "llama3.2-1b": DecoderConfig(
        layers=16,
        width=2048,
        heads=32,
        hidden=8192,
        rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
        **_LLAMA3 | {"context_length": 131_072, "tie_embeddings": True},
    ),
    "mistral-7b": DecoderConfig(
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        hidden=14_336,
        vocab_size=32_000,
        context_length=32_768,
        **flags("mistral"),
    ),
    "qwen2-0.5b": DecoderConfig(
        layers=24,
        width=896,
        heads=14,
        kv_heads=2,
        hidden=4864,
        context_length=131_072,
        **flags("qwen2") | _QWEN,
    ),
    "qwen3-0.6b": DecoderConfig(
        layers=28,
        width=1024,
        heads=16,
        kv_heads=8,
        hidden=3072,
        context_length=40_960,
        **flags("qwen3") | _QWEN,
    ),
    # Mixtures of experts; the first is named after all of its parameters and those of a token.
    "mixtral-3m-a1m": DecoderConfig(
        **_MIXTRAL
        | {"layers": 4, "width": 128, "heads": 4, "kv_heads": 2, "hidden": 192}
        | {"tie_embeddings": True},
    ),
    "mixtral-8x7b": DecoderConfig(
        **_MIXTRAL
        | {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14_336}
        | {"vocab_size": 32_000, "context_length": 32_768, "rope_theta": 1e6},
    ),
    "qwen3-30b-a3b": DecoderConfig(
        **flags("qwen3_moe")
        | _QWEN
        | {"layers": 48, "width": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128}
        | {"hidden": 768, "experts": 128, "experts_per_token": 8, "context_length": 40_960}
        | {"tie_embeddings": False, "norm_topk_prob": True},
    ),
    "gpt-oss-20b": DecoderConfig(layers=24, experts=32, **_GPT_OSS),
    "gpt-oss-120b": DecoderConfig(layers=36, experts=128, **_GPT_OSS),
    "deepseek-v3": DecoderConfig(
        **flags("deepseek_v3")
        | {"layers": 61, "width": 7168, "heads": 128, "kv_heads": 128, "norm_eps": 1e-6}
        | {"hidden": 2048, "dense_hidden": 18_432, "experts": 256, "experts_per_token": 8}
        | {"vocab_size": 129_280, "context_length": 4096},
    ),
    "gemma3-1b": DecoderConfig(
        **flags("gemma3_text")
        | {"layers": 26, "width": 1152, "heads": 4, "kv_heads": 1, "hidden": 6912}
        | {"vocab_size": 262_144, "context_length": 32_768, "sliding_window": 512}
        | {"norm_eps": 1e-6},
    ),
    "phi3-mini-4k": DecoderConfig(
        **flags("phi3")
        | {"layers": 32, "width": 3072, "heads": 32, "kv_heads": 32, "hidden": 8192}
        | {"vocab_size": 32_064, "context_length": 4096, "sliding_window": 2047},
    ),
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-355m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    # Every layer is dense here; the original alternates dense and locally banded attention.
    "gpt3-175b": _gpt2(96, 12_288, 96, context_length=2048),
    "pythia-160m": _gpt_neox(12, 768, 12, vocab_size=50_304),
    "gpt-neox-20b": _gpt_neox(44, 6144, 64, vocab_size=50_432),
    "gpt-j-6b": DecoderConfig(
        layers=28,
        width=4096,
        heads=16,
        kv_heads=16,
        hidden=16_384,
        vocab_size=50_400,
        context_length=2048,
        rotary_fraction=0.25,
        **flags("gptj"),
    ),
}


def preset(name: str) -> DecoderConfig:
    """Return the shape of that name; raise UserError with the nearest name if there is none."""
    if name in PRESETS:
        return PRESETS[name]
    family, is_own, own = name.partition("/")
    if is_own:
        return _own_preset(family, own)
    close = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(PRESETS)}"
    raise UserError(f"model.preset = {name!r}: no such preset; {hint}")


def _own_preset(family: str, name: str) -> DecoderConfig:
    """Return a preset of a family that a team's own package adds."""
    presets = find_family(family).presets
    if name not in presets:
        raise UserError(
            f"model.preset = '{family}/{name}': the family {family} has the presets "
            f"{', '.join(presets) or 'none'}"
        )
    return DecoderConfig(**{**flags(family), **presets[name]})
