"""Further models, and further things to learn from, compute on the GPU what they do on the CPU."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from pipelines.data.tokens.tokenizer import byte_tokenizer, save_tokenizer
from pipelines.models.config import DecoderConfig, Yarn
from pipelines.models.families import flags
from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import resolve_layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import parallelize
from pipelines.recipe.recipe import Recipe
from pipelines.reinforcement.answer_sampler import Sampler
from pipelines.reinforcement.prompts import Prompt
from pipelines.reinforcement.rollout_loader import InThisProcess, RolloutLoader
from pipelines.run.records import Split
from pipelines.training.hooks import Events
from pipelines.training.metrics import StepMetrics
from pipelines.training.precision import set_precision
from pipelines.training.reference import use_reference
from pipelines.training.trainer import Trainer
from tests.benchmarks import train
from tests.benchmarks.contenders.our_trainer import build_trainer
from tests.benchmarks.gpu_train import case, shape_of
from tests.benchmarks.loader import write_split
from tests.distributed.training import make_pairs
from tests.gpu_acceptance.acceptance_parts import Outcome, Place
from tests.gpu_acceptance.training_speed import measured, sized

_STEPS = 6
_WITHIN = 1e-4
_ROUNDED_WITHIN = 5e-2  # in bf16, compiled; the norms of gradients too
_COMPILED_OVER_EAGER = 1.1
_VOCABULARY, _TOKENS = 512, 100_000
_SHAPE = train.SHAPE | {"vocab_size": _VOCABULARY, "layers": 2, "context_length": 128}
_EXPERTS = {"experts": 8, "experts_per_token": 2, "hidden": 256, "kv_heads": 4}
_GPT_OSS = flags("gpt_oss") | _EXPERTS | {"sliding_window": 48, "rope_scaling": Yarn(4.0, 64)}
_DEEPSEEK = flags("deepseek_v3") | _EXPERTS | {"kv_heads": 8, "n_group": 4, "topk_group": 2}
_DEEPSEEK |= {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
_DEEPSEEK |= {"qk_rope_head_dim": 16, "first_k_dense_replace": 1, "dense_hidden": 512}
_TRAIN = train.TRAIN | {"steps": _STEPS, "warmup_steps": 2, "log_every": 1}
# 0.7 billion parameters, of which a token goes through 0.25.
_MIXTURE = case(
    shape_of("llama-1b", 2048, layers=8, width=1024, heads=16, kv_heads=8, hidden=1792)
    | flags("mixtral")
    | {"experts": 16, "experts_per_token": 4, "vocab_size": 32_000},
    4,
    16,
)


@dataclass(frozen=True)
class Kind:
    """A model and what it learns from.

    Attributes:
        shape: Of the model.
        sections: Of the recipe.
        pairs: Whether it learns from pairs of answers.
    """

    shape: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    pairs: bool = False


_PAIRS = {"data": {"instruction": {"kind": "preference"}, "packing": "best_fit"}}
_PAIRS["data"] |= {"document_mask": True}
_KINDS = {
    "gpt_oss": Kind(_GPT_OSS),
    "deepseek_v3": Kind(_DEEPSEEK),
    "adapters of experts": Kind(
        flags("mixtral") | _EXPERTS, {"adapter": {"kind": "lora", "rank": 8}}
    ),
    "dpo": Kind({}, _PAIRS | {"preference": {"kind": "dpo", "beta": 0.5}}, pairs=True),
    "kto": Kind({}, _PAIRS | {"preference": {"kind": "kto", "beta": 0.5}}, pairs=True),
}
Curve = list[tuple[float, float]]


def kinds(place: Place) -> Outcome:
    """Losses and gradients' norms of six steps of each kind, in fp32 as on the CPU.

    In bf16, compiled, they need only be near; that is said beside it. Rewards are left out there:
    one other answer makes all that follow other ones.
    """
    split = write_split(place.folder, _TOKENS, _VOCABULARY)
    (place.folder / "pairs").mkdir()
    pairs = make_pairs(place.folder / "pairs")
    curves: dict[str, Callable[..., Curve]] = {"grpo": partial(_rewarded, place.folder)}
    for name, kind in _KINDS.items():
        data = (place.folder / "pairs", pairs) if kind.pairs else (place.folder, split)
        curves[name] = partial(_curve, kind, *data)
    rounded = {"precision": "bf16", "compile": True}
    exact, near, failed = {}, {}, {}
    for name, curve in curves.items():
        expected = curve("cpu", {})
        try:
            exact[name] = _distance(expected, curve(place.device, {}))
            if name in _KINDS and not place.fake:
                near[name] = _distance(expected, curve(place.device, rounded))
        except Exception as error:  # the other kinds are tried, too; the part says it failed
            failed[name] = f"{type(error).__name__}: {error}"[:1000]
    worst = max(exact, key=exact.__getitem__) if exact else "none"
    rough = max(near.values(), default=0.0)
    told = f"{worst}; in bf16 {rough:.1e}" + "".join(f"; {name} failed" for name in failed)
    figure = exact.get(worst, math.inf)
    reached = figure <= _WITHIN and rough <= _ROUNDED_WITHIN and not failed
    detail = {"fp32": exact, "bf16 compiled": near, "failed": failed}
    return Outcome(figure, "relative", figure / _WITHIN, reached, told, detail)


def _distance(expected: Curve, found: Curve) -> float:
    """The largest relative difference of any loss or norm; infinite where one is no number."""
    pairs = zip(expected, found, strict=True)
    differences = [
        abs(theirs - ours) / max(abs(ours), 1e-6)
        for points in pairs
        for ours, theirs in zip(*points, strict=True)
    ]
    return max(each if math.isfinite(each) else math.inf for each in differences)


def _curve(kind: Kind, folder: Path, split: Split, device: str, values: dict[str, Any]) -> Curve:
    """Loss and norm of each step, with the weights that the CPU draws."""
    sections = kind.sections | {"train": _TRAIN | values}
    shape = _SHAPE | kind.shape | ({"context_length": 16} if kind.pairs else {})
    config = DecoderConfig(**shape)
    torch.compiler.reset()  # the sizes of another model would make those of this one dynamic
    drawn = build_trainer(folder, split, config, kind.sections | {"train": _TRAIN})
    built = build_trainer(folder, split, config, sections, torch.device(device))
    built.model.load_state_dict(drawn.model.state_dict())
    if built.trainer.recipe.preference.needs_reference:
        use_reference(built.trainer, folder / f"{device} {len(values)} {kind.sections}.npy")
    built.trainer.fit()
    return [(point.loss, point.gradient_norm) for point in built.points]


def _rewarded(folder: Path, device: str, values: dict[str, Any]) -> Curve:
    """The mean reward and the norm of each step, with the weights that the CPU draws."""
    if not (folder / "tokenizer.json").exists():
        save_tokenizer(byte_tokenizer(), folder)
    wanted = {"kind": "grpo", "answers": 4, "max_tokens": 6, "kl": 0.1}
    recipe = Recipe.model_validate(
        {
            "name": "rewarded",
            "data": {"instruction": {"kind": "prompt_response"}, "sequence_length": 16},
            "model": {"init_from": "."},
            "train": _TRAIN | {"precision": "fp32", "compile": False} | values,
            "reinforcement": wanted | {"rewards": [{"name": "exact_match"}]},
        }
    )
    mesh = build_mesh(resolve_layout(recipe.parallel, 1), torch.device(device))
    shape = DecoderConfig(**_SHAPE | {"vocab_size": 257, "context_length": 16})
    drawn = Transformer(shape)
    drawn.init_weights(recipe.seed)

    def fill(model: Transformer) -> None:
        model.after_to_empty()
        model.load_state_dict(drawn.state_dict())

    def sampled() -> Transformer:
        with mesh.device:
            model = Transformer(shape)
        fill(model)
        return model

    prompts = [Prompt(number, [ord("0") + number, ord("?")], []) for number in range(8)]
    loader = RolloutLoader(recipe, prompts, mesh)
    set_precision(recipe.train, mesh.device)
    with torch.device("meta"):
        model = Transformer(shape)
    laid = parallelize(model, mesh, recipe, fill)
    sampler = Sampler(recipe, folder, sampled, mesh.device)
    sampler._rewards = {"exact_match": _small_letters}
    loader.begin(laid, InThisProcess(sampler), Events())
    points: list[StepMetrics] = []
    run = Path(mkdtemp(dir=folder))
    Trainer(recipe, laid, loader, points.append, run / "checkpoints", run).fit()
    return [(point.further["reward"], point.gradient_norm) for point in points]


def _small_letters(prompt: str, answer: str, wanted: str) -> float:
    del prompt, wanted
    return sum("a" <= letter <= "z" for letter in answer) / 6


def mixture(place: Place) -> Outcome:
    """A mixture of experts, compiled beside eager."""
    compiled = measured(place, sized(place, _MIXTURE, 12))
    work = sized(place, _MIXTURE, 12)
    work["train"]["compile"] = False
    eager = measured(place, work)
    rate, slower = (each["tokens_per_second"] for each in (compiled, eager))
    ratio = rate / slower
    limits = f"MFU {compiled['mfu']:.2f} of what a token goes through, eager {eager['mfu']:.2f}"
    detail = compiled | {"eager": eager}
    reached = ratio >= _COMPILED_OVER_EAGER
    return Outcome(rate, "tokens/s", ratio, reached, limits, detail)
