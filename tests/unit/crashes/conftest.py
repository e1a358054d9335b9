"""Nothing waits for the disk: a `kill -9` loses nothing that the kernel has."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_wait_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "sync", lambda: None)
    monkeypatch.setenv("GIT_TEST_FSYNC", "0")
