"""How a decoder is divided into the stages of a pipeline."""

import torch
from torch import nn

from pipelines.distributed.mesh import Mesh
from pipelines.distributed.stages import Schedule, stage_count, stage_numbers
from pipelines.models.division import stage_layers
from pipelines.models.transformer import Transformer


def pipeline_parts(model: Transformer, mesh: Mesh, schedule: Schedule) -> list[Transformer]:
    """The stages of this process, of the modules of `model`.

    Raises:
        UserError: there are more stages than layers.
    """
    pp = mesh.layout.pp
    stages = stage_layers(model.config, stage_count(schedule, pp))
    return [part_of(model, stages[n]) for n in stage_numbers(schedule, pp, mesh.coordinate("pp"))]


def part_of(model: Transformer, layers: range) -> Transformer:
    """Consecutive layers with what belongs to them, as `Transformer` says; nothing is copied.

    Except the weight of a tied head that is parted from its embeddings.
    """
    with torch.device("meta"):
        part = Transformer(model.config, layers)
    part.layers = nn.ModuleDict({name: model.layers[name] for name in part.layers})
    part.rotary_2SR = model.rotary_2SR
    part.cross_entropy = model.cross_entropy
    if part.embed_tokens is not None:
        part.embed_tokens, part.embed_positions = model.embed_tokens, model.embed_positions
    if part.lm_head is not None:
        part.norm, part.lm_head = model.norm, model.lm_head
    if (copy := part.tied_copy) is not None:
        own = nn.Parameter(copy.detach().clone(), copy.requires_grad)
        part.get_submodule("lm_head").register_parameter("weight", own)
    return part
