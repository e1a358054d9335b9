"""Self-contained pages: a single HTML file that includes its styles and loads nothing.

Jinja2 escapes every value that is put in, so text of documents, models and recipes stays text.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PAGES = Path(__file__).with_name("pages")


class Table(NamedTuple):
    """A table of a page, whose first column names the rows."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: bool = True  # in all columns except the first
    total: bool = False  # the last row is the sum


def render(template: str, values: Mapping[str, Any]) -> str:
    """Return a page made from a template of `pages`; a missing value is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(PAGES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    page: str = environment.get_template(template).render(values)
    return page
