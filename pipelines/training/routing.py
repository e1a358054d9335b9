"""What the routers of a mixture of experts do in training.

A router may come to send most tokens to one expert: the others then learn nothing any more.
"""

import math
from typing import Any

import torch
from torch import Tensor

from pipelines.parallel.gradients import gradient_norm
from pipelines.parallel.parallelize import Parallelized
from pipelines.recipe.training_section import Train

COLLAPSED_STEPS = 50  # after which a run goes back


class Routing:
    """Weighs the routers' losses, and sees how they spread the tokens; each process comes to the
    same figures. A model without experts has no routers, and no figures.

    Attributes:
        shares: Of all tokens, that each expert of each layer had in the last window.
        figures: Of the last window, by name. For each layer, the shares of the most and the least
            chosen expert, and the entropy of all shares, divided by the largest that it can be.
    """

    def __init__(self, model: Parallelized, train: Train, tokens_per_step: int) -> None:
        """Find this process's routers, and set the weights of their losses."""
        self._mesh = mesh = model.mesh
        self._config = model.modules[0].config
        self._routers = {
            int(number): router for part in model.modules for number, router in part.routers.items()
        }
        for router in self._routers.values():
            router.balance, router.z = train.balance_loss, train.z_loss
        self._rate = train.balance_rate if self._config.sigmoid_router else 0.0
        self._routes: Tensor | float = 0.0  # of the steps since the last window
        # Tensor parallel processes all add the same to the gradient.
        self._share = mesh.layout.dp_cp / tokens_per_step / mesh.layout.tp
        self.shares: list[list[float]] = []
        self.figures: dict[str, float] = {}
        self._collapsed_steps = 0  # up to now, of a layer that has been collapsed at log points
        self._collapsed_layer = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"steps": self._collapsed_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self._collapsed_steps = state_dict["steps"]

    def weigh(self, scale: Tensor | float) -> None:
        """Give the routers' losses a step's weight; gradients are multiplied by `scale`."""
        for router in self._routers.values():
            router.share.fill_(scale * self._share)

    def end_window(self, steps: int) -> None:
        """Look at the steps since the last call, of this number; this waits for the device."""
        if not self._config.experts:
            return
        by_layer = self._shares()
        norm = gradient_norm([each.weight for each in self._routers.values()], self._mesh)
        self.figures = figures = {"router_gradient_norm": norm.item()}
        self.shares = by_layer.tolist()
        parts = by_layer / self._config.experts_per_token
        entropies = torch.special.entr(parts).sum(dim=1) / math.log(self._config.experts)
        by_number = zip(self.shares, entropies.tolist(), strict=True)
        for number, (shares, entropy) in enumerate(by_number, self._config.first_k_dense_replace):
            layer = f"experts_of_layer_{number:02}"
            figures[f"{layer}/largest_share"] = max(shares)
            figures[f"{layer}/smallest_share"] = min(shares)
            figures[f"{layer}/entropy"] = entropy
        self._watch(by_layer, steps)

    @torch.no_grad()
    def move_biases(self, left_out: Tensor) -> None:
        """Move each expert's bias towards even load, by a step's routes, if that is not left out.

        Adapters do not hold biases, so these stay where routers are frozen.
        """
        if not self._rate:
            return
        routes = self._count()
        for number, router in self._routers.items():
            if (bias := router.e_score_correction_bias) is not None and router.weight.requires_grad:
                missing = routes[number].mean() - routes[number]
                bias += (1 - left_out) * self._rate * missing.sign()
        self._routes += routes

    def _shares(self) -> Tensor:
        """Return the share of tokens that each expert had, [mixtures, experts], and begin anew."""
        routes, self._routes = self._routes + self._count(), 0.0
        shares = routes / routes.sum(dim=1, keepdim=True) * self._config.experts_per_token
        return shares[self._config.first_k_dense_replace :]

    def _count(self) -> Tensor:
        """Return how often each expert was chosen since the last call, [layers, experts]."""
        config = self._config
        routes = torch.zeros(config.layers, config.experts, device=self._mesh.device)
        for number, router in self._routers.items():
            routes[number] = router.routes_E
            router.routes_E.zero_()
        self._mesh.sum(routes, "pp", "dp_replicate", "dp_shard", "cp")
        return routes

    def _watch(self, by_layer: Tensor, steps: int) -> None:
        """Count the steps in which an expert is nearer to all tokens than to its even share."""
        even = self._config.experts_per_token / self._config.experts
        largest = by_layer.amax(dim=1)
        layer = int(largest.argmax())
        collapsed = float(largest[layer]) > (1 + even) / 2
        self._collapsed_steps = self._collapsed_steps + steps if collapsed else 0
        self._collapsed_layer = layer + self._config.first_k_dense_replace

    def go_back(self) -> None:
        """Begin anew, after a checkpoint was loaded."""
        self._collapsed_steps = 0
        self._shares()

    @property
    def collapse(self) -> str:
        """What is wrong, or nothing."""
        if self._collapsed_steps < COLLAPSED_STEPS:
            return ""
        return (
            f"layer {self._collapsed_layer} sent most of its tokens to one of its "
            f"{self._config.experts} experts for {self._collapsed_steps} steps"
        )
