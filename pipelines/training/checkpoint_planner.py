"""Whether a checkpoint is of the model that is to be restored."""

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from pipelines.core.errors import UserError


class SameModelPlanner(DefaultLoadPlanner):
    """Refuses a checkpoint that holds other tensors than the processes together ask for."""

    metadata: Metadata

    def create_local_plan(self) -> LoadPlan:
        """What this process reads.

        Raises:
            UserError: a tensor is missing or has another shape.
        """
        stored = self.metadata.state_dict_metadata
        for name, tensor in self.state_dict.items():
            if name not in stored:
                raise _another_model(f"it has no {name}")
            found = stored[name]
            shape = tuple(found.size) if isinstance(found, TensorStorageMetadata) else None
            if shape != tuple(tensor.shape):
                raise _another_model(f"{name} is {shape} there, but {tuple(tensor.shape)} here")
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On one process: a tensor that nobody reads is of a larger model, or of another one."""
        wanted = {item.storage_index.fqn for plan in global_plan for item in plan.items}
        if unknown := sorted(self.metadata.state_dict_metadata.keys() - wanted):
            raise _another_model(f"it also has {unknown[0]}")
        return super().create_global_plan(global_plan)


def _another_model(difference: str) -> UserError:
    return UserError(
        f"it is of another model or adapter: {difference}; set the recipe that it was made with, "
        "or begin anew elsewhere"
    )
