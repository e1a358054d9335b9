"""Layouts and shipped recipes to try on GPUs that don't exist, beside the planner's formulas."""

from dataclasses import dataclass, field, replace
from typing import Any

from pipelines.models.config import DecoderConfig
from pipelines.models.families import flags
from pipelines.models.presets import preset
from pipelines.planning.communication import REACHED, Communication, communication
from pipelines.planning.hardware import Hardware
from pipelines.planning.hardware_table import named
from pipelines.planning.layout_rule import Choice, choose
from pipelines.planning.precision_rule import Device, settle_precision
from pipelines.planning.step_time import trainable
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import load_recipe, override_values
from pipelines.training.dry_run.dry_run import Case, Report
from tests.settled import FP32

LENGTH = 2048
# All layers are alike, so that four say as much as sixteen.
SHAPE = replace(preset("llama-1b"), layers=4, context_length=LENGTH)
EXPERTS = replace(
    SHAPE, hidden=1024, experts=16, experts_per_token=4, norm_topk_prob=True, family="mixtral"
)
GPT_OSS = replace(
    preset("gpt-oss-20b"),
    layers=4,
    width=2048,
    heads=32,
    hidden=1024,
    experts=16,
    vocab_size=32_000,
    context_length=LENGTH,
)
_LATENTS = {"kv_lora_rank": 512, "q_lora_rank": 1024, "dense_hidden": 4096, "hidden": 1024}
_LATENTS |= {"experts": 16, "experts_per_token": 3, "n_group": 4, "first_k_dense_replace": 1}
LATENTS = DecoderConfig(
    **vars(SHAPE) | flags("deepseek_v3") | _LATENTS | {"kv_heads": SHAPE.heads, "topk_group": 2}
)
H100, B200 = named("h100"), named("b200")
BASES = {
    "llama3-8b-lora": "llama3-8b",
    "llama3-8b-qlora": "llama3-8b",
    "qwen3-30b-a3b-lora": "qwen3-30b-a3b",
    "lora-gsm8k": "llama3.2-1b",
    "chat-from-demo": "llama-700k",
    "dpo-demo": "llama-700k",
    "llama3-8b-dpo": "llama3-8b",
}
SMALL_VOCABULARY = 1024


@dataclass(frozen=True)
class Tried:
    """A run to try.

    Attributes:
        world: GPUs.
        parallel, train, adapter, data: Sections of its recipe.
        graphs: Compiled of blocks.
        hardware: The GPUs.
        shape: The model.
    """

    world: int = 1
    parallel: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    graphs: int = 0
    hardware: Hardware = H100
    shape: DecoderConfig = SHAPE

    def laid(self) -> tuple[Case, Choice]:
        """Return the case, and the planner's choice for it."""
        sizes = {"micro_batch_size": 2, "global_batch_size": 8 * self.world, "precision": "bf16"}
        values = {
            "name": "tried",
            "parallel": self.parallel,
            "train": FP32 | sizes | self.train,
            "data": {"sequence_length": LENGTH} | self.data,
            "adapter": self.adapter,
        }
        recipe = Recipe.model_validate(values)
        return laid(recipe, self.world, shape=self.shape, hardware=self.hardware)


FULL = {"sharding": "full"}
LORA = {"kind": "lora", "rank": 16}
QLORA = LORA | {"kind": "qlora"}
HALF_SUMS = {"reduce_dtype": "bf16"}
AGAIN = {"activation_checkpoint": "full"}
SELECTIVE = {"activation_checkpoint": "selective"}
FEW = {"micro_batch_size": 1}
# Compiled, a dry run runs each operator of a graph by itself, so that it counts results that
# Inductor never writes: it tells more than a GPU needs, most of all where products round to fp8.
COMPILED = {"compile": True}
IN_8_BITS = {"optimizer": "adamw_8bit"}
FP8 = COMPILED | {"precision": "fp8"}
PAGED = {"paged_moments": True}
BY_ROWS = FP8 | {"fp8_scaling": "rowwise"}
MX = FP8 | {"fp8_scaling": "mx"}

DOCUMENTS = {"document_mask": True}
VARLEN = {"attention": "varlen"}

ONE, REPLICAS = Tried(), Tried(8)
QUICK = {
    "sharded": Tried(8, FULL | {"dp_shard": 8}),
    "tensor": Tried(8, FULL | {"tp": 2, "dp_shard": 4}, SELECTIVE),
    "pipeline": Tried(2, {"pp": 2}),
    "compiled": Tried(8, FULL | {"dp_shard": 8}, COMPILED, graphs=1),
    "lora": Tried(adapter=LORA),
    "experts": Tried(8, FULL | {"dp_shard": 8}, shape=EXPERTS),
    "latents": Tried(8, FULL | {"dp_shard": 8}, shape=LATENTS),
    "documents, varlen, pipeline": Tried(2, {"pp": 2}, VARLEN, data=DOCUMENTS),
    "documents, varlen, compiled": Tried(train=VARLEN | COMPILED, data=DOCUMENTS, graphs=1),
}
FURTHER = {
    "one": ONE,
    "replicas": REPLICAS,
    "fp32": Tried(train={"precision": "fp32"}),
    "muon": Tried(train={"optimizer": "muon"}),
    "replicas, muon": Tried(8, train={"optimizer": "muon"}),
    "8 bits": Tried(train=IN_8_BITS),
    "paged": Tried(parallel=PAGED),
    "sharded, paged": Tried(8, FULL | PAGED | {"dp_shard": 8}),
    "zero 1, paged": Tried(8, PAGED | {"sharding": "optimizer"}),
    "lora, paged": Tried(parallel=PAGED, adapter=LORA),
    "sharded, 8 bits": Tried(8, FULL | {"dp_shard": 8}, IN_8_BITS),
    "compiled, 8 bits": Tried(8, FULL | {"dp_shard": 8}, IN_8_BITS | COMPILED, graphs=1),
    "lora, 8 bits": Tried(adapter=LORA, train=IN_8_BITS),
    "fp8": Tried(8, FULL | {"dp_shard": 8}, FP8, graphs=1),
    "fp8, one": Tried(train=FP8, graphs=1),
    "fp8, zero 2": Tried(8, {"sharding": "gradients", "dp_shard": 8}, FP8, graphs=1),
    "fp8, tensor": Tried(8, FULL | {"tp": 2, "dp_shard": 4}, FP8, graphs=1),
    "fp8, pipeline": Tried(8, FULL | {"pp": 2, "dp_shard": 4}, FP8 | AGAIN, graphs=1),
    "fp8 by rows": Tried(8, FULL | {"dp_shard": 8}, BY_ROWS, graphs=1),
    "fp8 by rows, tensor": Tried(8, FULL | {"tp": 2, "dp_shard": 4}, BY_ROWS, graphs=1),
    "mxfp8": Tried(8, FULL | {"dp_shard": 8}, MX, graphs=1, hardware=B200),
    "mxfp8, one": Tried(train=MX, graphs=1, hardware=B200),
    "mxfp8, tensor, selective": Tried(
        8, FULL | {"tp": 2, "dp_shard": 4}, MX | SELECTIVE, graphs=1, hardware=B200
    ),
    "documents": Tried(data=DOCUMENTS, graphs=1),
    "documents, varlen": Tried(train=VARLEN, data=DOCUMENTS),
    "documents, varlen, selective": Tried(train=VARLEN | SELECTIVE, data=DOCUMENTS),
    "documents, varlen, compiled, context": Tried(
        8, FULL | {"cp": 2, "dp_shard": 4}, VARLEN | COMPILED | SELECTIVE, data=DOCUMENTS, graphs=1
    ),
    "documents, varlen, tensor": Tried(8, FULL | {"tp": 2, "dp_shard": 4}, VARLEN, data=DOCUMENTS),
    "recomputed": Tried(train=AGAIN),
    "selective": Tried(train=SELECTIVE),
    "zero 1": Tried(8, {"sharding": "optimizer"}),
    "zero 2": Tried(8, {"sharding": "gradients", "dp_shard": 8}),
    "replicas, sums in bf16": Tried(8, HALF_SUMS),
    "zero 1, sums in bf16": Tried(8, HALF_SUMS | {"sharding": "optimizer"}),
    "sharded, sums in bf16": Tried(8, HALF_SUMS | FULL | {"dp_shard": 8}),
    "hybrid": Tried(16, FULL | {"dp_replicate": 2, "dp_shard": 8}),
    "context": Tried(8, FULL | {"cp": 2, "dp_shard": 4}),
    "tensor alone": Tried(4, {"tp": 4}),
    "tensor, overlapped": Tried(4, {"tp": 4, "async_tp": True}, COMPILED, graphs=1),
    "interleaved": Tried(2, {"pp": 2, "schedule": "interleaved_1f1b"}),
    "sharded pipeline": Tried(8, FULL | {"pp": 2, "dp_shard": 4}, AGAIN),
    "four stages": Tried(4, {"pp": 4}),
    "gpipe": Tried(4, {"pp": 4, "schedule": "gpipe"}, FEW),
    "zero bubble": Tried(2, {"pp": 2, "schedule": "zero_bubble"}, FEW),
    "compiled alone": Tried(train=COMPILED, graphs=1),
    "lora selective": Tried(adapter=LORA, train=SELECTIVE),
    "qlora": Tried(adapter=QLORA),
    "sharded lora": Tried(8, FULL | {"dp_shard": 8}, adapter=LORA),
    "lora tensor": Tried(8, FULL | {"tp": 2, "dp_shard": 4}, adapter=LORA),
    "lora tensor, of queries": Tried(
        8, FULL | {"tp": 2, "dp_shard": 4}, adapter=LORA | {"targets": ["q_proj"]}
    ),
    "lora tensor, recomputed": Tried(8, FULL | {"tp": 2, "dp_shard": 4}, AGAIN, adapter=LORA),
    "lora pipeline": Tried(2, {"pp": 2, "schedule": "interleaved_1f1b"}, AGAIN, adapter=LORA),
    "qlora tensor": Tried(4, {"tp": 4}, adapter=QLORA),
    "experts, one": Tried(shape=EXPERTS),
    "experts, replicas": Tried(8, shape=EXPERTS),
    "experts, compiled": Tried(8, FULL | {"dp_shard": 8}, COMPILED, graphs=1, shape=EXPERTS),
    # The first block's input needs no gradient, so that its graph is another one.
    "experts, lora compiled": Tried(
        8, FULL | {"dp_shard": 8}, COMPILED, graphs=2, adapter=LORA, shape=EXPERTS
    ),
    "experts, selective": Tried(8, FULL | {"dp_shard": 8}, SELECTIVE, shape=EXPERTS),
    "experts, recomputed": Tried(8, FULL | {"dp_shard": 8}, AGAIN, shape=EXPERTS),
    "experts, tensor": Tried(8, FULL | {"tp": 2, "dp_shard": 4}, shape=EXPERTS),
    "experts, pipeline": Tried(2, {"pp": 2}, shape=EXPERTS),
    "experts, context": Tried(8, FULL | {"cp": 2, "dp_shard": 4}, shape=EXPERTS),
    "experts, muon": Tried(train={"optimizer": "muon"}, shape=EXPERTS),
    "experts, 8 bits": Tried(train=IN_8_BITS, shape=EXPERTS),
    "experts, lora": Tried(adapter=LORA, shape=EXPERTS),
    "experts, lora of attention": Tried(adapter=LORA | {"targets": ["q_proj"]}, shape=EXPERTS),
    "experts, lora tensor": Tried(8, FULL | {"tp": 2, "dp_shard": 4}, adapter=LORA, shape=EXPERTS),
    "experts, sharded lora": Tried(8, FULL | {"dp_shard": 8}, adapter=LORA, shape=EXPERTS),
    "experts, lora selective": Tried(adapter=LORA, train=SELECTIVE, shape=EXPERTS),
    # A mask for each kind of layers.
    "sinks, one": Tried(graphs=2, shape=GPT_OSS),
    "sinks, sharded": Tried(8, FULL | {"dp_shard": 8}, graphs=2, shape=GPT_OSS),
    "sinks, compiled": Tried(8, FULL | {"dp_shard": 8}, COMPILED, graphs=2, shape=GPT_OSS),
    "sinks, selective": Tried(8, FULL | {"dp_shard": 8}, SELECTIVE, graphs=2, shape=GPT_OSS),
    "sinks, tensor": Tried(8, FULL | {"tp": 2, "dp_shard": 4}, graphs=2, shape=GPT_OSS),
    "sinks, context": Tried(8, FULL | {"cp": 2, "dp_shard": 4}, graphs=2, shape=GPT_OSS),
    "sinks, lora": Tried(adapter=LORA, graphs=2, shape=GPT_OSS),
    "latents, one": Tried(shape=LATENTS),
    "latents, compiled": Tried(8, FULL | {"dp_shard": 8}, COMPILED, graphs=2, shape=LATENTS),
    "latents, selective": Tried(8, FULL | {"dp_shard": 8}, SELECTIVE, shape=LATENTS),
    "latents, tensor": Tried(8, FULL | {"tp": 2, "dp_shard": 4}, shape=LATENTS),
    "latents, context": Tried(8, FULL | {"cp": 2, "dp_shard": 4}, shape=LATENTS),
    "latents, lora": Tried(adapter=LORA, shape=LATENTS),
    "latents, 8 bits": Tried(train=IN_8_BITS, shape=LATENTS),
    "latents, muon": Tried(train={"optimizer": "muon"}, shape=LATENTS),
    "1024 GPUs": Tried(1024, FULL | {"dp_replicate": 16, "dp_shard": 64}),
}


def laid(
    recipe: Recipe, world: int, shape: DecoderConfig, hardware: Hardware = H100
) -> tuple[Case, Choice]:
    """Return a recipe's case, and the planner's choice for it."""
    if recipe.adapter.kind != "none":
        recipe = recipe.model_copy(
            update={"model": recipe.model.model_copy(update={"init_from": "models/base"})}
        )
    if not shape.vocab_size:
        shape = shape.sized(SMALL_VOCABULARY, recipe.data.sequence_length)
    recipe = settle_precision(recipe, Device.of(hardware))
    choice = choose(recipe, shape, world, hardware.memory_bytes, hardware=hardware)
    return Case(choice.recipe, shape, hardware, world), choice


def shipped(name: str) -> tuple[Case, Choice]:
    """Return the case of a shipped recipe, and the planner's choice for it.

    The steps of a pipeline have an eighth of their micro-batches, as all of them take minutes.
    """
    recipe = load_recipe(name)
    if recipe.parallel.pp != 1:
        fewer = recipe.train.global_batch_size // 8
        recipe = override_values(recipe, {"train.global_batch_size": fewer})
    shape = preset(BASES.get(name, recipe.model.preset))
    return laid(recipe, recipe.resources.most_workers, shape)


# Links on which a byte takes a second.
_SLOW = replace(H100, link_bandwidth=1 / REACHED, network_bandwidth=1 / REACHED)


def predicted(case: Case, choice: Choice) -> Communication:
    """Return the bytes through a process's link that the planner predicts."""
    links = replace(_SLOW, devices_per_node=case.world)
    return communication(case.shape, choice.training, links, trainable(case.shape, choice.training))


def sent(report: Report, *groups: str) -> float:
    """Return the bytes through a process's link that the dry run saw in these groups."""
    every = [
        (2 if each["kind"] == "all_reduce" else 1) * each["bytes"] * (1 - 1 / each["size"])
        for rank in report.ranks
        for each in rank.collectives
        if each["group"] in groups
    ]
    return sum(every) / len(report.ranks)
