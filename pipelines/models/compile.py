"""Regional compile: a decoder's blocks, which are alike, are compiled once and not one by one."""

import os
from pathlib import Path

import torch

from pipelines.core.errors import UserError
from pipelines.core.settings import load_settings
from pipelines.models.loss import CrossEntropy
from pipelines.models.transformer import Transformer

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def check_path(device: torch.device, folder: Path = Path(torch.__file__).parent) -> None:
    """Raise UserError where what is compiled can't be linked with torch, which is in `folder`.

    torch 2.13 does not quote the path of its libraries when it links code for a CPU.
    """
    if device.type == "cpu" and " " in str(folder):
        raise UserError(
            f"train.compile: torch can't compile for a CPU from {folder}, a path with a space; "
            "move the project or set train.compile = false"
        )


def compile_blocks(part: Transformer, backend: str = "inductor") -> None:
    """Compile each block, and the loss where it is here, in place; a graph break is an error.

    It is a block's `forward` that is compiled: hooks on the block, such as FSDP's, stay outside,
    and parameters keep their names. A micro-batch of another size makes one more graph, for all
    sizes. What is compiled is kept in `PENSTOCK_HOME`, or where TORCHINDUCTOR_CACHE_DIR says.
    """
    os.environ.setdefault(_CACHE, str(load_settings().home / "torchinductor"))
    # DDP needs no cuts in a graph as small as a block, and its cutter does not know checkpointing.
    torch._dynamo.config.optimize_ddp = False
    regions = list(part.layers.values())
    if isinstance(part.cross_entropy, CrossEntropy):  # not one that exchanges with other processes
        regions.append(part.cross_entropy)
    for region in regions:
        region.forward = torch.compile(region.forward, fullgraph=True, backend=backend)
