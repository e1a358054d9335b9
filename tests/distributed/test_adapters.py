"""Adapters over several processes learn what they learn in one, on a base that stays as it is."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from pipelines.loading.dataloader import TokenLoader
from pipelines.loading.token_dataset import TokenDataset
from pipelines.models.config import DecoderConfig, Yarn
from pipelines.models.families import flags
from pipelines.models.initial_model import build_model
from pipelines.models.model_folder import load_config
from pipelines.models.peft_format import fill_adapters, save_adapter
from pipelines.models.pretrained import load_weights, save_pretrained
from pipelines.models.quantization import NF4Linear
from pipelines.models.transformer import Transformer
from pipelines.models.weights import whole
from pipelines.parallel.layout import resolve_layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import parallelize
from pipelines.recipe.recipe import Recipe
from pipelines.run.records import Split
from pipelines.training.metrics import StepMetrics
from pipelines.training.profiling import StepProfiler
from pipelines.training.trainer import Trainer
from tests.compiling import needs_a_linker
from tests.distributed.pool import Pool
from tests.distributed.training import LENGTH, SHAPE, make_data
from tests.settled import FP32

# Wide enough for blocks of 64 on both of two processes; the second one's part of `up_proj` begins
# within the 256 blocks that share a scale's scale.
WIDE = {"width": 128, "hidden": 384, "qkv_bias": True, "output_bias": True, "mlp_bias": True}
CONFIG = DecoderConfig(**SHAPE | WIDE)
# Their experts have adapters, too.
MIXTURE = DecoderConfig(**SHAPE | flags("mixtral") | {"experts": 4, "experts_per_token": 2})
GPT_OSS = {"experts": 4, "experts_per_token": 2, "kv_heads": 2, "sliding_window": 5}
SINKS = DecoderConfig(**SHAPE | flags("gpt_oss") | GPT_OSS | {"rope_scaling": Yarn(4.0, 8)})
LATENTS = flags("deepseek_v3") | {"experts": 4, "experts_per_token": 2, "n_group": 1, "kv_heads": 4}
LATENTS |= {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6}
LATENTS |= {"v_head_dim": 9, "first_k_dense_replace": 1, "dense_hidden": 48}
FURTHER = {"experts": MIXTURE, "sinks": SINKS, "latents": DecoderConfig(**SHAPE | LATENTS)}
FULL = {"sharding": "full"}
_ONE = {"micro_batch_size": 1}  # so that four shares of a batch are more than one micro-batch each
CASES = {
    "experts-zero-3": ("experts", FULL, {}),
    "experts-ddp": ("experts", {}, {}),
    "experts-zero-1": ("experts", {"sharding": "optimizer"}, {}),
    "experts-tp": ("experts", {"tp": 2}, {}),
    "experts-1f1b": ("experts", {"pp": 2}, {}),
    "experts-zero-bubble": ("experts", {"pp": 2, "schedule": "zero_bubble"}, {}),
    "experts-cp": ("experts", {"cp": 2}, {}),
    "experts-ep": ("experts", FULL | {"ep": 2}, {}),
    "experts-ep-selective": ("experts", FULL | {"ep": 2}, {"activation_checkpoint": "selective"}),
    "experts-ep-fsdp": ("experts", FULL | {"ep": 2}, _ONE),
    "experts-ep-tp": ("experts", FULL | {"ep": 2, "tp": 2}, {}),
    "experts-ep-pp": ("experts", FULL | {"ep": 2, "pp": 2}, {}),
    "experts-tp-fsdp": ("experts", FULL | {"tp": 2}, {}),
    "experts-ep-tp-fsdp": ("experts", FULL | {"ep": 2, "tp": 2}, _ONE),
    "sinks-ep-fsdp": ("sinks", FULL | {"ep": 2}, _ONE),
    "sinks-zero-3": ("sinks", FULL, {}),
    "sinks-tp": ("sinks", {"tp": 2}, {}),
    "sinks-cp": ("sinks", {"cp": 2}, {}),
    "latents-zero-3": ("latents", FULL, {}),
    "latents-tp": ("latents", {"tp": 2}, {}),
    "latents-tp-no-sp": ("latents", {"tp": 2, "sequence_parallel": False}, {}),
    "latents-cp": ("latents", {"cp": 2}, {}),
    "latents-pp": ("latents", {"pp": 2}, {}),
    "lora-ddp": ("lora", {}, {}),
    "lora-zero-3": ("lora", FULL, {}),
    "lora-zero-3-checkpointed": ("lora", FULL, {"activation_checkpoint": "full"}),
    "lora-tp": ("lora", {"tp": 2}, {}),
    "lora-tp-no-sp": ("lora", {"tp": 2, "sequence_parallel": False}, {}),
    "lora-tp-zero-3": ("lora", FULL | {"tp": 2, "dp_shard": 2}, {"activation_checkpoint": "full"}),
    "lora-tp-cp": ("lora", {"tp": 2, "cp": 2}, {}),
    "lora-cp": ("lora", {"cp": 2}, {}),
    "lora-cp-zero-3": ("lora", FULL | {"cp": 2}, {}),
    "lora-gpipe": ("lora", {"pp": 2, "schedule": "gpipe"}, {}),
    "lora-1f1b": ("lora", {"pp": 2, "schedule": "1f1b"}, {}),
    "lora-interleaved-1f1b": ("lora", {"pp": 2, "schedule": "interleaved_1f1b"}, {}),
    "lora-zero-bubble": ("lora", {"pp": 2, "schedule": "zero_bubble"}, {}),
    "lora-zero-bubble-checkpointed": (
        "lora",
        {"pp": 2, "schedule": "zero_bubble"},
        {"activation_checkpoint": "full"},
    ),
    "lora-pp-replicas": ("lora", {"pp": 2}, {}),
    "lora-pp-zero-3": ("lora", FULL | {"pp": 2}, {"activation_checkpoint": "selective"}),
    "lora-pp-zero-2": ("lora", {"pp": 2, "sharding": "gradients", "schedule": "zero_bubble"}, {}),
    "lora-pp-tp": ("lora", {"pp": 2, "tp": 2}, {}),
    "lora-pp-cp": ("lora", {"pp": 2, "cp": 2}, {}),
    "qlora-pp": ("qlora", {"pp": 2, "schedule": "interleaved_1f1b"}, {}),
    "qlora-zero-bubble": ("qlora", {"pp": 2, "schedule": "zero_bubble"}, {}),
    "qlora-pp-zero-3": ("qlora", FULL | {"pp": 2}, {}),
    "qlora-tp": ("qlora", {"tp": 2}, {}),
    "qlora-tp-no-sp": ("qlora", {"tp": 2, "sequence_parallel": False}, {}),
    "qlora-tp-selective": ("qlora", {"tp": 2}, {"activation_checkpoint": "selective"}),
    "qlora-tp-compiled": ("qlora", {"tp": 2}, {"compile": True}),
    "qlora-tp-zero-2": ("qlora", {"tp": 2, "sharding": "gradients"}, {}),
    "qlora-tp-zero-3": ("qlora", FULL | {"tp": 2}, {"activation_checkpoint": "full"}),
    "qlora-tp-replicas": ("qlora", {"tp": 2}, {}),
    "qlora-tp-cp": ("qlora", {"tp": 2, "cp": 2}, {}),
    "qlora-pp-tp": ("qlora", {"pp": 2, "tp": 2}, {}),
    "qlora-cp": ("qlora", {"cp": 2}, {"activation_checkpoint": "selective"}),
    "qlora-ddp": ("qlora", {}, {}),
    "qlora-zero-1": ("qlora", {"sharding": "optimizer"}, {}),
    "qlora-zero-2": ("qlora", {"sharding": "gradients"}, {}),
    "qlora-zero-3": ("qlora", FULL, {}),
    "qlora-zero-3-checkpointed": ("qlora", FULL, {"activation_checkpoint": "selective"}),
    "qlora-zero-3-offload": ("qlora", FULL | {"cpu_offload": True}, {}),
}
FOUR = (
    *("experts-ep-fsdp", "experts-ep-tp", "experts-ep-pp", "experts-tp-fsdp", "sinks-ep-fsdp"),
    *("lora-tp-zero-3", "lora-tp-cp", "lora-pp-replicas", "lora-pp-zero-3", "lora-pp-zero-2"),
    *("lora-pp-tp", "lora-pp-cp", "qlora-pp-zero-3", "qlora-pp-tp", "qlora-tp-zero-2"),
    *("qlora-tp-zero-3", "qlora-tp-replicas", "qlora-tp-cp"),
)
EIGHT = ("experts-ep-tp-fsdp",)
IN_MAKE_TEST = ("lora-zero-3", "qlora-zero-3")
CHAINS = {
    "pp-2 to one to pp-2": [(2, {"pp": 2}), (1, {}), (2, {"pp": 2, "schedule": "gpipe"})],
    "tp-2 to one to tp-2-fsdp-2": [(2, {"tp": 2}), (1, {}), (4, FULL | {"tp": 2})],
    "one to pp-2-fsdp-2 to fsdp-2": [(1, {}), (4, FULL | {"pp": 2}), (2, FULL)],
    "ep-2-fsdp-2 to one to fsdp-2": [(4, FULL | {"ep": 2}), (1, {}), (2, FULL)],
}


class Outcome(NamedTuple):
    """Of one process."""

    losses: list[float]
    base_moved: bool
    gradients: dict[str, Tensor]  # of the last step, by name; in a pipeline those of its stages


def recipe(kind: str, base: Path, parallel: dict[str, Any], train: dict[str, Any]) -> Recipe:
    size = {"micro_batch_size": 2, "global_batch_size": 8}
    pace = {
        "steps": 20 if kind == "experts" else 4,
        "warmup_steps": 1,
        "lr": 1e-2,
        "log_every": 1,
        "checkpoint_every": 1000,
    }
    return Recipe.model_validate(
        {
            "name": "t",
            "model": {"init_from": str(base)},
            "adapter": {"kind": "lora" if kind in FURTHER else kind, "rank": 3, "alpha": 6},
            "parallel": parallel,
            "train": {**FP32, **size, **pace, **train},
        }
    )


def fill(recipe: Recipe, part: Transformer) -> None:
    load_weights(part, Path(recipe.model.init_from or ""))
    fill_adapters(part, recipe)


def build(recipe: Recipe) -> Transformer:
    """A model in fp64, without weights."""
    model = build_model(recipe, load_config(Path(recipe.model.init_from or "")))
    for each in model.to(torch.float64).modules():
        if isinstance(each, NF4Linear):
            each.dtype = torch.float64
    return model


def train(
    recipe: Recipe, data: tuple[Path, Split], folder: Path, cut: int | None = None
) -> Outcome:
    """What each process does, to the end or until step `cut` is told."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = build_mesh(resolve_layout(recipe.parallel, world), torch.device("cpu"))
    loader = TokenLoader.of(TokenDataset(*data, LENGTH), recipe, mesh)
    laid = parallelize(build(recipe), mesh, recipe, partial(fill, recipe))
    frozen = {n: whole(p).clone() for n, p in laid.named_parameters().items() if "lora" not in n}
    points: list[StepMetrics] = []
    checkpoints = folder / "checkpoints"

    def report(point: StepMetrics) -> None:
        points.append(point)
        if point.step == cut:
            raise InterruptedError

    trainer = Trainer(recipe, laid, loader, report, str(checkpoints), checkpoints)
    # Its window under the profiler takes longer than all of these steps.
    trainer.profiler = StepProfiler(None, checkpoints, rank=0, world=1)
    try:
        trainer.fit()
    except InterruptedError:
        return Outcome([point.loss for point in points], False, {})
    now = laid.named_parameters()
    moved = any(not torch.equal(whole(now[name]), before) for name, before in frozen.items())
    save_pretrained(laid.modules, folder / "model")
    save_adapter(laid.modules, folder / "adapter")
    gradients = {name: whole(each.grad) for name, each in now.items() if each.grad is not None}
    return Outcome([point.loss for point in points], moved, gradients)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Split]:
    folder = tmp_path_factory.mktemp("data")
    return folder, make_data(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(CONFIG, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_base(shape, tmp_path_factory.mktemp(name)) for name, shape in FURTHER.items()
    }


def write_base(config: DecoderConfig, folder: Path) -> Path:
    model = Transformer(config)
    model.init_weights(5)
    for name, parameter in model.named_parameters():
        if name.endswith((".bias", ".sinks")):
            torch.nn.init.normal_(parameter, std=0.1)
    save_pretrained(model, folder)
    return folder


@pytest.fixture(scope="module")
def alone(
    base: Path,
    mixtures: dict[str, Path],
    data: tuple[Path, Split],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Outcome, Path]]:
    """What one process does, and where it wrote it."""

    @cache
    def of(kind: str) -> tuple[Outcome, Path]:
        folder = tmp_path_factory.mktemp("alone")
        read = mixtures.get(kind, base)
        return train(recipe(kind, read, {}, {}), data, folder), folder

    return of


def processes(name: str) -> int:
    return 8 if name in EIGHT else 4 if name in FOUR else 2


def marks(name: str) -> list[pytest.MarkDecorator]:
    """All but two cases are part of the proof only."""
    if name in IN_MAKE_TEST:
        return []
    return [pytest.mark.parity, *([needs_a_linker] if name.endswith("compiled") else [])]


@pytest.mark.parametrize(
    ("world", "kind", "parallel", "only_here"),
    [
        pytest.param(processes(name), *CASES[name], id=name, marks=marks(name))
        for name in sorted(CASES, key=processes)  # new processes once for each
    ],
)
def test_several_processes_learn_what_one_does(
    world: int,
    kind: str,
    parallel: dict[str, Any],
    only_here: dict[str, Any],
    base: Path,
    mixtures: dict[str, Path],
    data: tuple[Path, Split],
    alone: Callable[[str], tuple[Outcome, Path]],
    pool: Callable[[int], Pool],
    tmp_path: Path,
) -> None:
    expected, folder = alone(kind)
    read = mixtures.get(kind, base)
    found = pool(world).run(train, recipe(kind, read, parallel, only_here), data, tmp_path)
    seen = set()
    for outcome in (expected, *found):
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-10)
        assert not outcome.base_moved
        assert all(name.endswith(("lora_a.weight", "lora_b.weight")) for name in outcome.gradients)
        for name, gradient in outcome.gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[name], atol=1e-10, rtol=1e-8)
        if outcome is not expected:
            seen |= outcome.gradients.keys()
    assert seen == expected.gradients.keys()
    check_written(folder, tmp_path)


def check_written(ours: Path, theirs: Path) -> None:
    """The model and its adapter are whole, and the same."""
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        expected, found = load_file(ours / name), load_file(theirs / name)
        assert expected.keys() == found.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-6, rtol=1e-6)
    config = "adapter/adapter_config.json"
    assert (theirs / config).read_bytes() == (ours / config).read_bytes()


@pytest.mark.parity
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_run_goes_on_from_another_layouts_checkpoint(
    chain: list[tuple[int, dict[str, Any]]],
    base: Path,
    mixtures: dict[str, Path],
    data: tuple[Path, Split],
    alone: Callable[[str], tuple[Outcome, Path]],
    pool: Callable[[int], Pool],
    tmp_path: Path,
) -> None:
    kind = "experts" if any("ep" in parallel for _, parallel in chain) else "qlora"
    read = mixtures.get(kind, base)
    expected, folder = alone(kind)
    losses: list[float] = []
    for done, (world, parallel) in enumerate(chain):
        # Of a step that is told after a checkpoint, nothing is left.
        cut = None if done == len(chain) - 1 else done + 2
        arguments = (recipe(kind, read, parallel, {"checkpoint_every": 1}), data, tmp_path, cut)
        found = [train(*arguments)] if world == 1 else pool(world).run(train, *arguments)
        assert all(each.losses == found[0].losses for each in found)
        losses = losses[:done] + found[0].losses
    assert losses == pytest.approx(expected.losses, rel=1e-10)
    check_written(folder, tmp_path)
