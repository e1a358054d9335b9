"""Tiny tensors gain nothing from threads, and lose much where cores are busy."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
