"""How a decoder is laid over processes that share each sequence: context parallel.

Each process has the embeddings, norms, feed-forward layers and the loss of its part of the
sequence. In attention it has some heads of the whole, so masks are those of one process. Rotary
positions are turned there; learned ones are looked up by their places in the whole.
"""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from pipelines.distributed.context_parallel import PartOfHeads, PartOfSequence
from pipelines.models.transformer import Transformer


def context_parallel(part: Transformer, mesh: DeviceMesh) -> None:
    """Give a decoder, or a stage of one, its part of each sequence, in place.

    It is called with whole sequences, as before, and after `tensor_parallel` if both are wanted.
    What it returns is of its part: the nats of its positions, or their logits. Over the processes
    nats add up, and so do gradients. `check_division` has found that heads and positions divide.
    """
    width = part.config.head_width
    styles: dict[str, ParallelStyle] = {
        "q_proj": PartOfHeads(width),
        "k_proj": PartOfHeads(width),
        "v_proj": PartOfHeads(width),
        "o_proj": PartOfSequence(),
    }
    plan = {
        f"layers.{number}.self_attn.{name}": style
        for number in part.layers
        for name, style in styles.items()
    }
    parallelize_module(part, mesh, plan)
    part.context = mesh.get_local_rank(), mesh.size()
    part.sequence_shards *= mesh.size()
