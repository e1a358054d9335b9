"""The same bits from the same step, also on a GPU."""

import os

import torch


def set_deterministic(wanted: bool) -> None:
    """Use only algorithms that give the same bits each time; some are slower.

    On the CPU they all do. An operation without such an algorithm raises RuntimeError.
    """
    if wanted:
        # cuBLAS's own condition; it must stand before the first matrix product on the GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.benchmark = False
