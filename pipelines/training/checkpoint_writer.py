"""Checkpoints of `torch.distributed.checkpoint`, written durably and marked last."""

from collections.abc import Callable

from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pipelines.training.checkpoint_store import FSSPEC_OPTIONS


class CheckpointWriter(FsspecWriter):
    """A file a process, to a folder or to S3."""

    def __init__(self, url: str, clear: Callable[[], None], complete: Callable[[], None]) -> None:
        """Nothing is written yet.

        Args:
            url: Where the files go.
            clear: Removes what is there of an earlier try; called on one process, before any
                writes.
            complete: Called on one process once the files of all are durable. What it raises,
                every process raises.
        """
        # A file is synced before it counts as written. In S3 it is durable once it is closed.
        super().__init__(url, sync_files="://" not in url, **FSSPEC_OPTIONS)
        self._clear = clear
        self._complete = complete

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing yet: what one process makes here, another may just be clearing away."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On one process, once all have planned and before any of them writes."""
        self._clear()
        self.fs.mkdir(self.path)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what is this process's.

        Raises:
            OSError: of a full disk, say; torch's archive, as it is closed, hides it behind an error
                of its own.
        """
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """After all processes wrote; the only place where a checkpoint becomes one."""
        super().finish(metadata, results)
        self._complete()
