"""Losses over pairs of answers, of which one was chosen and one rejected.

A sample holds whole pairs: its documents are a chosen conversation, its rejected one, the next
pair's chosen one, and so on. Only the answers' tokens have targets. For KTO, which looks at each
answer by itself, one of the two may have no targets: answers that are labelled good or bad.

Shape suffixes: B batch, S positions, M conversations of a sample, N pairs of a sample.

Papers: DPO (Rafailov et al. 2023, equation 7), with label smoothing (Mitchell 2023, "A note on DPO
with noisy preferences"); IPO (Azar et al. 2023, equation 17), by token as its authors advise; KTO
(Ethayarajh et al. 2024, section 4.1), whose reference point is explained at `PairLoss`; ORPO (Hong
et al. 2024, equations 6 and 7); SimPO (Meng et al. 2024, equation 6).
"""

# ruff: noqa: N803, N806, N812 (names that end in their shape)

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce

from pipelines.loading.dataloader import IGNORED, Batch
from pipelines.parallel.mesh import Mesh
from pipelines.recipe.preference_section import Preference

_SHARES = "pp", "dp_replicate", "dp_shard"  # processes along these have other pairs, or none


class PairLoss:
    """The `Objective` of preference tuning: the sum of the losses of all pairs of a batch.

    KTO compares each answer with how much likelier answers became as a whole, or with 0 if they
    did not. Its authors measure that on answers to other prompts, which takes another pass. Here it
    is the mean over the chosen and rejected answers of the step before, which is known when a
    step's first micro-batch needs it, and is the same under every layout.

    Attributes:
        figures: Of the last window: the share of pairs whose chosen answer has the larger reward,
            by how much it is larger, and the rewards. A reward is beta times how much likelier an
            answer became; or beta times its log-likelihood a token, where there is no reference.
            That of an answer that is not there is 0.
    """

    def __init__(self, preference: Preference, most_documents: int, mesh: Mesh) -> None:
        """Set up for samples with at most so many documents."""
        self._by = preference
        self.conversations = most_documents + most_documents % 2
        self._mesh = mesh
        self._context = mesh.along("cp")
        self._seen: list[Tensor] = []  # of each micro-batch of this step: `_note`
        self._sums = torch.zeros(6, dtype=torch.float64, device=mesh.device)  # of this window
        self._point = self._sums.sum()  # KTO's reference point
        self.figures: dict[str, float] = {}

    def counted(self, batch: Batch) -> Tensor:
        """Return how many pairs a batch of whole sequences has, and for KTO how many answers."""
        counted_BS = (batch.targets_BS != IGNORED).float()
        documents_BS = cast("Tensor", batch.documents_BS)
        lengths_BM = self._by_conversation(counted_BS, documents_BS)
        return self._units(self._there(lengths_BM)).sum()

    def __call__(
        self,
        nats_BS: Tensor,
        targets_BS: Tensor,
        documents_BS: Tensor,
        known_BK: Tensor | None,
    ) -> Tensor:
        """Return the summed loss of all pairs.

        Args:
            nats_BS: Minus the log-likelihood of each target of this process's part of the samples.
            targets_BS: The targets, or `IGNORED`.
            documents_BS: The number of each target's conversation within its sample.
            known_BK: The log-likelihood of each answer by the model that training started from.
        """
        counted_BS = (targets_BS != IGNORED).to(nats_BS.dtype)
        logs_BM = self.of_conversations(-nats_BS, documents_BS)
        lengths_BM = self.of_conversations(counted_BS, documents_BS)
        there_BM = self._there(lengths_BM)
        if known_BK is not None:
            logs_BM = logs_BM - known_BK.to(logs_BM.dtype)
        # Where there is no answer, any numbers do, but those that have no logarithm.
        means_BM = (logs_BM / lengths_BM.clamp(min=1)).where(there_BM, -1.0)
        self._note(means_BM if self._by.by_token else logs_BM, there_BM)
        loss = self._losses(logs_BM, means_BM).where(self._units(there_BM), 0.0).sum()
        # Processes that share a sample all have its loss: it counts once, its gradient everywhere.
        first = self._context is None or self._context.get_local_rank() == 0
        return loss if first else loss - loss.detach()

    def _there(self, lengths_BM: Tensor) -> Tensor:
        """Return which answers count, [B, M]; padding and left out samples have none."""
        there_BM = lengths_BM > 0
        if self._by.kind == "kto":
            return there_BM
        return (there_BM[:, ::2] & there_BM[:, 1::2]).repeat_interleave(2, dim=1)

    def _units(self, of_answers_BM: Tensor) -> Tensor:
        """Return what answers say of what has a loss: of each answer, [B, M], or pair, [B, N]."""
        return of_answers_BM if self._by.kind == "kto" else of_answers_BM[:, ::2]

    def _losses(self, logs_BM: Tensor, means_BM: Tensor) -> Tensor:
        by = self._by
        means = means_BM[:, ::2], means_BM[:, 1::2]
        apart_BN = means[0] - means[1]
        if by.kind == "ipo":
            return (apart_BN - 1 / (2 * by.beta)).square()
        if by.kind == "kto":
            point = self._point.to(logs_BM.dtype)
            good_BN, bad_BN = logs_BM[:, ::2] - point, point - logs_BM[:, 1::2]
            good_BN, bad_BN = (1 - torch.sigmoid(by.beta * each) for each in (good_BN, bad_BN))
            return torch.stack((good_BN, by.weight_of_rejected * bad_BN), dim=2).flatten(1)
        if by.kind == "orpo":
            odds_BN = apart_BN - (_log_of_rest(means[0]) - _log_of_rest(means[1]))
            return -means[0] - by.beta * F.logsigmoid(odds_BN)
        if by.kind == "simpo":
            return self._logistic(by.beta * apart_BN - by.margin)
        if not by.by_token:
            apart_BN = logs_BM[:, ::2] - logs_BM[:, 1::2]
        return self._logistic(by.beta * apart_BN)

    def _logistic(self, apart_BN: Tensor) -> Tensor:
        wrong = self._by.label_smoothing
        return -(1 - wrong) * F.logsigmoid(apart_BN) - wrong * F.logsigmoid(-apart_BN)

    def of_conversations(self, values_BS: Tensor, documents_BS: Tensor) -> Tensor:
        """Return the sum of this and the other processes' positions of each conversation, [B, M].

        Its gradient is that of this process's positions.
        """
        sums_BM = self._by_conversation(values_BS, documents_BS)
        if self._context is None:
            return sums_BM
        mine_BM = sums_BM.detach()
        others_BM: Tensor = all_reduce(mine_BM, "sum", self._context) - mine_BM
        return sums_BM + others_BM

    def _by_conversation(self, values_BS: Tensor, documents_BS: Tensor) -> Tensor:
        zeros_BM = values_BS.new_zeros(len(values_BS), self.conversations)
        return zeros_BM.scatter_add(1, documents_BS.long(), values_BS)

    @torch.no_grad()
    def _note(self, scores_BM: Tensor, there_BM: Tensor) -> None:
        rewards_BM = (self._by.beta * scores_BM).double().where(there_BM, 0.0)
        (chosen_BN, rejected_BN), (good_BN, bad_BN) = (
            (each_BM[:, ::2], each_BM[:, 1::2]) for each_BM in (rewards_BM, there_BM)
        )
        right_BN = chosen_BN > rejected_BN
        seen = good_BN | bad_BN, right_BN, good_BN, bad_BN, chosen_BN, rejected_BN
        self._seen.append(torch.stack([each.sum(dtype=torch.float64) for each in seen]))

    def end_step(self, micro_batches: int) -> None:
        """Settle what KTO compares the next step's answers with; all processes call it."""
        # A pipeline's first step runs one micro-batch more, before the others.
        step = torch.stack([torch.zeros_like(self._sums), *self._seen[-micro_batches:]]).sum(dim=0)
        self._seen.clear()
        self._sums += step
        if self._by.kind == "kto":
            self._mesh.sum(step, *_SHARES)
            _, _, good, bad, chosen, rejected = step
            point = (chosen + rejected) / (self._by.beta * (good + bad))
            self._point = torch.where(point.isfinite(), point.clamp(min=0), self._point)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; this waits for the device."""
        return {"point": self._point.item()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self._point.fill_(state_dict["point"])

    def end_window(self) -> None:
        """Make `figures` of what was seen since the last call; this waits for the device."""
        self._mesh.sum(self._sums, *_SHARES)
        pairs, right, good, bad, chosen, rejected = self._sums.tolist()
        self._sums.zero_()
        if pairs:
            chosen, rejected = chosen / max(good, 1), rejected / max(bad, 1)
            self.figures = {
                "pairs_chosen_right": right / pairs,
                "reward_margin": chosen - rejected,
                "reward_of_chosen": chosen,
                "reward_of_rejected": rejected,
            }


def _log_of_rest(logs: Tensor) -> Tensor:
    """Return log(1 - p) of log p, exact near both ends (Mächler 2012, equation 7)."""
    return torch.where(
        logs > -0.6931472, torch.log(-torch.expm1(logs)), torch.log1p(-torch.exp(logs))
    )
