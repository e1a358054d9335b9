"""The loss of a trained model on a few sequences, measured before the model is written."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from pipelines.loading.dataloader import IGNORED, Batch
from pipelines.models.check_batch import CheckBatch
from pipelines.parallel.process_group import from_all
from pipelines.training.trainer import Trainer

_MOST_SAMPLES = 8
_MOST_TOKENS = 2048  # of each: the logits of as many fit beside a model


def last_loss(trainer: Trainer) -> CheckBatch:
    """Return some sequences with the loss that the model has on them now; all ranks call this.

    It runs the forward and backward passes of a step as training does, in whatever layout, since
    that is what is to be compared, and throws the gradients away. Each sequence is read as one
    document, as a server reads what it is sent.
    """
    for decoder in trainer.model.modules:
        decoder.objective = None  # the nats of single tokens are what others can compute, too
    for part in trainer.model.parts:
        for module in part.modules():
            if isinstance(module, nn.Dropout) and module.p:  # others need not be compiled again
                module.eval()
    mesh = trainer.mesh
    here = max(1, _MOST_SAMPLES // mesh.dp_world)
    measured = here if mesh.dp_rank * here < _MOST_SAMPLES else 0
    batches, _ = trainer.batches.of(trainer.train.steps - 1)  # nothing is read ahead of the last
    chosen = list(_only(batches, measured))
    nats = trainer.forward_backward(chosen, 1.0).double()
    mesh.sum(nats, "pp", "dp_replicate", "dp_shard", "cp")
    for parameter in trainer.parameters:
        parameter.grad = None
    mine = (each[:measured, :_MOST_TOKENS].cpu() for each in chosen[0][0][:2])
    found = dict(from_all((mesh.dp_rank, tuple(mine))))
    inputs, targets = zip(*(found[share] for share in sorted(found)), strict=True)
    precision, length = str(trainer.train.fixed_precision), chosen[0][0].inputs_BS.shape[1]
    return CheckBatch(torch.cat(inputs), torch.cat(targets), nats.item(), precision, length)


def _only(batches: Iterable[tuple[Batch, bool]], samples: int) -> Iterator[tuple[Batch, bool]]:
    """Yield micro-batches of which only the first samples of the first one predict anything."""
    for batch, is_last in batches:
        targets = torch.full_like(batch.targets_BS, IGNORED)
        targets[:samples, :_MOST_TOKENS] = batch.targets_BS[:samples, :_MOST_TOKENS]
        documents = batch.documents_BS
        alone = None if documents is None else torch.zeros_like(documents)
        yield Batch(batch.inputs_BS, targets, alone), is_last
        samples = 0
