"""Checkpoints of `torch.distributed.checkpoint`, written durably and marked last."""

from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from pipelines.training.checkpoint_store import FSSPEC_OPTIONS


class CheckpointWriter(FsspecWriter):
    """A file a process, to a folder or to S3."""

    def __init__(self, url: str, clear: Callable[[], None], complete: Callable[[], None]) -> None:
        """Nothing is written yet.

        Args:
            url: Where the files go.
            clear: Removes what is there of an earlier try; called on one process, first.
            complete: Called on one process once the files of all are durable. What it raises,
                every process raises.
        """
        # A file is synced before it counts as written. In S3 it is durable once it is closed.
        super().__init__(url, sync_files="://" not in url, **FSSPEC_OPTIONS)
        self._clear = clear
        self._complete = complete

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Before any process plans what it writes."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            self._clear()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """After all processes wrote; the only place where a checkpoint becomes one."""
        super().finish(metadata, results)
        self._complete()
