"""The loss of answers that a model sampled itself, by what they were worth.

It is that of GRPO (Shao et al. 2024, "DeepSeekMath", equation 3), with one pass over each answer.
How a token is weighed may also be as in Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like
Training", section 3) or DAPO (Yu et al. 2025, equation 8).

Shape suffixes: B batch, S positions, K what is known of a sample: `KNOWN` numbers a position.
"""

# ruff: noqa: N803, N806 (names that end in their shape)

import torch
from torch import Tensor

from pipelines.loading.dataloader import IGNORED, Batch
from pipelines.parallel.mesh import Mesh
from pipelines.recipe.reinforcement_section import Reinforcement

# Of each position: the answer's advantage, the token's share in the loss, and its log-likelihood
# by the model that sampled it and by the one that training started from.
KNOWN = 4
_SHARES = "pp", "dp_replicate", "dp_shard", "cp"  # processes along these have other positions


class PolicyLoss:
    """The `Objective` of reinforcement: a sum over the answers of a batch.

    Attributes:
        figures: Of the last window, a token: how far the model is from the one that training
            started from, by how much trainer and sampler disagree, and the share of tokens that
            teach nothing more, as they changed enough.
    """

    def __init__(self, by: Reinforcement, mesh: Mesh) -> None:
        self._by = by
        self._mesh = mesh
        self._context = mesh.along("cp")
        self._seen: list[Tensor] = []  # of each micro-batch of this step
        self._sums = torch.zeros(4, dtype=torch.float64, device=mesh.device)  # of this window
        self.figures: dict[str, float] = {}

    def counted(self, batch: Batch) -> Tensor:
        """Return how many answers a batch of whole sequences has."""
        return (batch.targets_BS != IGNORED).any(dim=1).sum()

    def __call__(
        self,
        nats_BS: Tensor,
        targets_BS: Tensor,
        documents_BS: Tensor,  # noqa: ARG002
        known_BK: Tensor | None,
    ) -> Tensor:
        """Return the summed loss; the arguments are those of `Objective`."""
        if known_BK is None:
            raise ValueError("nothing is known of these answers")
        there_BS = targets_BS != IGNORED
        advantages, shares, sampled, first = self._mine(known_BK, targets_BS.shape[1])
        logs_BS = -nats_BS
        apart_BS = (logs_BS - sampled).where(there_BS, 0.0)
        ratio_BS = apart_BS.exp()
        least, most = self._by.clip
        clipped_BS = ratio_BS.clamp(1 - least, 1 + most)
        gain_BS = torch.minimum(ratio_BS * advantages, clipped_BS * advantages)
        back_BS = (first - logs_BS).where(there_BS, 0.0)
        # The estimator that is never negative (Schulman 2020, "Approximating KL divergence", k3).
        drift_BS = back_BS.exp() - back_BS - 1
        loss_BS = shares * (self._by.kl * drift_BS - gain_BS)
        self._note(there_BS, drift_BS, apart_BS.abs(), ratio_BS * advantages != gain_BS)
        return loss_BS.where(there_BS, 0.0).sum()

    def _mine(self, known_BK: Tensor, length: int) -> tuple[Tensor, ...]:
        """Return what is known of this process's positions, each [B, S]."""
        rank = 0 if self._context is None else self._context.get_local_rank()
        known = known_BK.view(len(known_BK), KNOWN, -1)[..., rank * length : (rank + 1) * length]
        return known.unbind(1)

    @torch.no_grad()
    def _note(self, there_BS: Tensor, *seen: Tensor) -> None:
        numbers = (torch.ones_like(seen[0]), *seen)
        self._seen.append(
            torch.stack([each.double().where(there_BS, 0.0).sum() for each in numbers])
        )

    def end_step(self, micro_batches: int) -> None:
        """Add up what was seen in a step."""
        # A pipeline's first step runs one micro-batch more, before the others.
        for each in self._seen[-micro_batches:]:
            self._sums += each
        self._seen.clear()

    def end_window(self) -> None:
        """Make `figures` of what was seen since the last call; this waits for the device."""
        self._mesh.sum(self._sums, *_SHARES)
        tokens, *sums = self._sums.tolist()
        self._sums.zero_()
        if tokens:
            names = "drift", "sampler_mismatch", "clipped_share"
            self.figures = {name: each / tokens for name, each in zip(names, sums, strict=True)}
