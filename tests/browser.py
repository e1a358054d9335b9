"""Headless Chromium, logged in to a platform's Airflow, and the pictures that the docs show."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipelines.core.settings import PROJECT

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 60_000
SCREENSHOTS = "PENSTOCK_SCREENSHOTS"  # set: the pictures of the docs are taken anew


@contextmanager
def airflow_page(url: str, password: Path) -> "Iterator[Page]":
    """A page that is logged in as `admin`, with the password in a file."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here; on Debian: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(PATIENCE_MS)
        page.goto(url)
        page.fill("input[name=username]", "admin")
        page.fill("input[name=password]", password.read_text().strip())
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"^(?!.*login).*$"))
        yield page
        browser.close()


def take_picture(of: "Page | Locator", name: str) -> None:
    """Take a picture for the docs, where the environment asks for it."""
    if os.environ.get(SCREENSHOTS):
        page = getattr(of, "page", of)
        page.wait_for_timeout(1000)  # what moves comes to rest
        of.screenshot(path=PROJECT / "docs" / "screenshots" / f"{name}.png")
