"""The kill matrix as a table: what was hurt, whether the run ended as it must, how soon it went on.

`make test-faults` runs the same rows. `ROW=row_04 penstock bench faults` runs some of them; their
lines replace those that the results file has of them.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

from pipelines.core.storage import read_json, write_json
from tests.benchmarks.harness import PROJECT

ROW = "ROW"  # as in the Makefile


def main(results: Path, device: dict[str, Any], *, as_json: bool) -> int:
    """Run the rows, keep and show them; 1 where one failed."""
    rows = run_rows(os.environ.get(ROW, "row"))
    path = results / "faults.json"
    kept = read_json(path)["rows"] if path.is_file() else []
    names = {row["test"] for row in rows}
    every = sorted([row for row in kept if row["test"] not in names] + rows, key=_order)
    result = {
        "benchmark": "faults",
        "command": "penstock bench faults",
        "device": device,
        "rows": every,
    }
    write_json(path, result)
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        Console().print(_table(rows))
    return 0 if all(row["outcome"] in ("passed", "skipped") for row in rows) else 1


def run_rows(which: str) -> list[dict[str, Any]]:
    """Those rows whose names hold the text, as the results file has them."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "faults", "tests/faults", "-k", which]
        # What pytest shows is for a user; stdout is for the result.
        subprocess.run(
            [*command, f"--junitxml={report}"], cwd=PROJECT, stdout=sys.stderr, check=False
        )
        # One that was interrupted has no name.
        cases = (
            case for case in ElementTree.parse(report).iter("testcase") if "name" in case.attrib
        )
        return sorted(map(_row, cases), key=_order)


def _row(case: ElementTree.Element) -> dict[str, Any]:
    name = case.attrib["name"]
    found = re.search(r"row_(\d+)", name)
    assert found is not None
    words = re.sub(r"[^a-z0-9]+", " ", name.removeprefix("test_").replace(found[0], ""))
    said = {each.attrib["name"]: json.loads(each.attrib["value"]) for each in case.iter("property")}
    trouble = [each for kind in ("failure", "error", "skipped") for each in case.iter(kind)]
    return {
        "row": int(found[1]),
        "test": name,
        "fault": words.strip(),
        "outcome": _outcome(trouble),
        "why": trouble[0].attrib.get("message", "").splitlines()[:1] if trouble else [],
        "recovered_s": said.get("recovered", []),
        "checks": said.get("checks", []),
        "seconds": round(float(case.attrib["time"]), 1),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _outcome(trouble: list[ElementTree.Element]) -> str:
    if not trouble:
        return "passed"
    return "skipped" if trouble[0].tag == "skipped" else "failed"


def _order(row: dict[str, Any]) -> tuple[int, str]:
    return row["row"], row["test"]


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("row", "fault", "outcome", "recovered after, s", "checks", title="faults")
    for row in rows:
        recovered = ", ".join(f"{each:.0f}" for each in row["recovered_s"])
        told = "; ".join([*row["why"], *row["checks"]])
        table.add_row(str(row["row"]), row["fault"], row["outcome"], recovered, told)
    return table
