"""Which reader: what the recipe names, or what a probe finds best."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from pipelines.loading.gds import GdsReader, why_not
from pipelines.loading.pinned import PinnedReader
from pipelines.loading.readers import MmapReader, Reader

LocalKind = Literal["auto", "mmap", "pinned", "gds"]

_log = logging.getLogger(__name__)


def open_reader(paths: Sequence[Path], device: torch.device, kind: LocalKind) -> Reader:
    """A reader of files for a device, as the recipe wants it.

    Token ids are some 50 KB/s a GPU: for them `auto` is the page cache, which all processes of a
    machine share. GPUDirect Storage that can't be had falls back to pinned buffers.
    """
    if kind == "gds":
        if reason := why_not(paths[0], device):
            _log.warning("no GPUDirect Storage, so pinned buffers: %s", reason)
            return PinnedReader(paths, device)
        return GdsReader(paths, device)
    return PinnedReader(paths, device) if kind == "pinned" else MmapReader(paths)


def open_for_bulk(paths: Sequence[Path], device: torch.device) -> Reader:
    """The best reader for gigabytes that are read once: a checkpoint, a model's weights."""
    if device.type != "cuda":
        return MmapReader(paths)
    reason = why_not(paths[0], device)
    reader = PinnedReader(paths, device) if reason else GdsReader(paths, device)
    _log.info("reading %s with %s%s", paths[0].parent, reader.name, f"; {reason}" * bool(reason))
    return reader
