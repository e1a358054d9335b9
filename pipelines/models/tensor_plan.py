"""How a decoder is divided over tensor-parallel processes.

Megatron's split: what a block reads is divided by columns, what it writes to the residual stream
by rows, so that a block needs two exchanges. The residual stream between them lies along the
sequence (sequence parallel) or whole in each process. Embeddings and head lie over the vocabulary.

An adapter beside a layer is divided as the layer is: beside columns its second matrix, by rows its
first. What lies between the two, as narrow as its rank, is then what is exchanged.
"""

from typing import cast

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from pipelines.distributed.tensor_parallel import (
    Replicated,
    VocabularyCrossEntropy,
    VocabularyEmbedding,
)
from pipelines.loading.dataloader import IGNORED
from pipelines.models.division import check_divisible
from pipelines.models.lora import LoRALinear
from pipelines.models.transformer import Block, Transformer

_SEQUENCE = Shard(1)
_HEADS = Shard(2)


def tensor_parallel(part: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Divide a decoder, or a stage of one, in place; its processes have the same weights.

    With targets it gives the loss as before; without, this process's part of the logits. A part
    that reads or gives hidden states has them as [B, S / tp, D] under sequence parallelism.

    Raises:
        UserError: heads or features can't be divided so.
    """
    check_divisible(part.config, mesh.size())
    stream: Placement = _SEQUENCE if sequence_parallel else Replicate()
    # Every process has the same weights: none needs to send them.
    parallelize_module(part, mesh, _plan(part, stream), src_data_rank=None)
    if part.lm_head is not None:
        part.cross_entropy = VocabularyCrossEntropy(mesh, part.config.vocab_size, IGNORED)
    if sequence_parallel:
        part.sequence_shards *= mesh.size()
    part.after_to_empty()  # ties what was divided apart


def _plan(part: Transformer, stream: Placement) -> dict[str, ParallelStyle]:
    """The style of each module that this part has."""
    plan: dict[str, ParallelStyle] = {}
    if part.embed_tokens is not None:
        plan["embed_tokens"] = VocabularyEmbedding(stream)
    if part.embed_positions is not None:
        plan["embed_positions"] = ColwiseParallel(output_layouts=stream)
    for number, layer in part.layers.items():
        styles = _block(cast("Block", layer), stream)
        plan |= {f"layers.{number}.{name}": style for name, style in styles.items()}
    if part.lm_head is not None:
        plan["norm"] = Replicated(stream, Replicate())
        plan["lm_head"] = ColwiseParallel()
    return plan


def _block(layer: Block, stream: Placement) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": Replicated(stream, stream),
        # Gathered once for all that read it.
        "self_attn": PrepareModuleInput(
            input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=stream),
        "mlp": PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate()),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=stream),
    }
    if layer.mlp.gate_proj is not None:
        plan["mlp.gate_proj"] = ColwiseParallel()
    if layer.post_attention_layernorm is not None:
        plan["post_attention_layernorm"] = Replicated(stream, stream)
    if layer.self_attn.qk_norm:
        plan["self_attn.q_norm"] = Replicated(_HEADS, _HEADS, local=True)
        plan["self_attn.k_norm"] = Replicated(_HEADS, _HEADS, local=True)
    return _with_adapters(layer, plan, stream)


def _with_adapters(
    block: Block, plan: dict[str, ParallelStyle], stream: Placement
) -> dict[str, ParallelStyle]:
    """The plan with three styles for a layer that has an adapter: its own, A's and B's."""
    found: dict[str, ParallelStyle] = {}
    for name, style in plan.items():
        if not isinstance(block.get_submodule(name), LoRALinear):
            found[name] = style
            continue
        found[f"{name}.base"] = style
        if isinstance(style, ColwiseParallel):
            found[f"{name}.lora_a"] = Replicated(Replicate(), Replicate())
            found[f"{name}.lora_b"] = ColwiseParallel()
        else:
            found[f"{name}.lora_a"] = RowwiseParallel(output_layouts=stream)
            found[f"{name}.lora_b"] = Replicated(stream, stream, local=True)
    return found
