"""The commands of a page of the docs, so that tests run what the page tells users to type."""

import re
from pathlib import Path

from pipelines.core.settings import PROJECT

RUNBOOK = PROJECT / "docs" / "cluster.md"
PROJECTS = PROJECT / "docs" / "projects.md"


def commands(*headings: str, page: Path = RUNBOOK) -> str:
    """The shell block under nested headings, such as `commands("Compose", "Back up")`.

    Raises:
        LookupError: the page has no such heading, or no block of commands below it.
    """
    text = page.read_text()
    for heading in headings:
        found = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
        if found is None:
            raise LookupError(f"{page.name} has no heading {heading!r} in {headings}")
        level = len(found[1])
        text = re.split(rf"^#{{1,{level}}} ", text[found.end() :], maxsplit=1, flags=re.MULTILINE)[
            0
        ]
    before_deeper = re.split(r"^#+ ", text, maxsplit=1, flags=re.MULTILINE)[0]
    block = re.search(
        r"(?:^    .*\n|^\n(?=    ))+", before_deeper.lstrip("\n") + "\n", re.MULTILINE
    )
    if block is None or not block[0].strip():
        raise LookupError(f"{page.name} has no commands under {headings}")
    return "\n".join(line[4:] for line in block[0].strip("\n").splitlines()) + "\n"
