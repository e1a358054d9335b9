"""The kill matrix as a table: what was hurt, whether the run ended as it must, how soon it went on.

Each row runs twice, in a random order and hurt at random moments; `SEED=7 penstock bench faults`
does it once, as the seed 7 has it. Half of a row is waiting: beside the rows that share a platform
run those that leave it alone. `ROW=row_04` runs some of the rows. What is kept after each seed
joins the lines that the results file has of the same rows and code, and replaces those of other
code. `make test-faults` runs the same rows, in order. The table is in docs/faults.md, too.
"""

import json
import os
import random
import re
import secrets
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

from pipelines.core.storage import read_json, write_json, write_text
from tests.benchmarks.harness import PROJECT
from tests.faults.pipeline_run import SEED

ROW = "ROW"  # as in the Makefile
_DIRTY = "-dirty"
_PYTEST = [sys.executable, "-u", "-m", "pytest", "-m", "faults"]
_APART = "tests/faults/apart/"  # of the rows that leave the shared platform alone
TIMES = 2  # each row runs so often, with a seed of its own
PAGE = PROJECT / "docs" / "faults.md"
_HEAD = """# Faults that were injected

`penstock bench faults` wrote this table: what was hurt, how that ended, after how many seconds the
work went on, and at which commit that was last seen. [Runs that survive](orchestration.md) says
what happens in each case.

| row | fault | outcome | went on after, s | seen | checked |
|--:|---|---|---|---|---|
"""


def main(results: Path, device: dict[str, Any], *, as_json: bool) -> int:
    """Run the rows, keep and show them; 1 where one failed."""
    given = os.environ.get(SEED)
    seeds = [int(given)] if given else [secrets.randbelow(10**6) for _ in range(TIMES)]
    which = os.environ.get(ROW, "row")
    path = results / "faults.json"
    result: dict[str, Any] = {"benchmark": "faults", "command": "penstock bench faults"}
    rows, failed, minutes = [], False, {}
    for seed in seeds:
        began = time.monotonic()
        kept = {row["test"]: row for row in (read_json(path)["rows"] if path.is_file() else [])}
        rows = [_with_kept(row, kept.get(row["test"])) for row in run_rows(which, seed)]
        every = sorted((kept | {row["test"]: row for row in rows}).values(), key=_order)
        minutes[seed] = round((time.monotonic() - began) / 60, 1)
        result |= {"device": device, "minutes": minutes, "rows": every}
        write_json(path, result)
        write_text(PAGE, page(every))
        failed |= not all(row["outcome"] in ("passed", "skipped") for row in rows)
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        Console().print(_table(rows))
    return int(failed)


def run_rows(which: str, seed: int) -> list[dict[str, Any]]:
    """Those rows whose names hold the text, as the results file has them."""
    commit = _commit()
    sys.stderr.write(f"{SEED}={seed} at {commit}\n")
    in_order = _in_order(which, seed)
    apart = [each for each in in_order if each.startswith(_APART)]
    lanes = [lane for lane in ([each for each in in_order if each not in apart], apart) if lane]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        reports = [Path(folder) / f"{number}.xml" for number in range(len(lanes))]
        list(pool.map(partial(_run, seed), lanes, reports))
        cases = [case for each in reports for case in ElementTree.parse(each).iter("testcase")]
    more = {"seeds": [seed], "commit": commit}
    # One that was interrupted has no name.
    return sorted((_row(case) | more for case in cases if "name" in case.attrib), key=_order)


def _run(seed: int, rows: list[str], report: Path) -> None:
    """Run rows one after the other; pytest's lines, each of them whole, are for a user."""
    command = [*_PYTEST, "-v", *rows, f"--junitxml={report}"]
    env = os.environ | {SEED: str(seed)}
    with subprocess.Popen(
        command, cwd=PROJECT, env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            sys.stderr.write(line)


def _in_order(which: str, seed: int) -> list[str]:
    """The tests' ids in the seed's order; a file's stay together, as they may share a platform."""
    collect = [*_PYTEST, "tests/faults", "-k", which, "--collect-only", "-q"]
    listed = subprocess.run(collect, cwd=PROJECT, capture_output=True, text=True, check=True)
    files: dict[str, list[str]] = {}
    for each in (line for line in listed.stdout.splitlines() if "::" in line):
        files.setdefault(each.partition("::")[0], []).append(each)
    order = random.Random(seed)
    shuffled = order.sample(sorted(files), len(files))
    return [each for file in shuffled for each in order.sample(files[file], len(files[file]))]


def _with_kept(row: dict[str, Any], kept: dict[str, Any] | None) -> dict[str, Any]:
    """One line for the runs of a row by other seeds, of the same code: it passed if all did."""
    same = kept is not None and kept["commit"] == row["commit"] and _DIRTY not in row["commit"]
    if kept is None or not same or row["seeds"][0] in kept["seeds"]:
        return row
    worst = row if kept["outcome"] == "passed" else kept
    return worst | {each: kept[each] + row[each] for each in ("seeds", "recovered_s")}


def _commit() -> str:
    """The last that changed more than texts and records; `-dirty` where what is tested is none."""
    rest = [".", ":!*.md", ":!tests/benchmarks/results"]
    changed = _git("status", "--porcelain", "--", *rest)
    return _git("log", "-1", "--format=%h", "--", *rest) + _DIRTY * bool(changed)


def _git(*command: str) -> str:
    told = subprocess.run(
        ["git", *command], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    return told.stdout.strip()


# A folder of one test, or a platform's.
_TEMPORARY = re.compile(r"/\S*/(pytest-\S*?/pytest-\d+/[^/\s]*|penstock test \w+)")


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
        "checks": [_TEMPORARY.sub("…", each) for each in said.get("checks", [])],
        "seconds": round(float(case.attrib["time"]), 1),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _outcome(trouble: list[ElementTree.Element]) -> str:
    if not trouble:
        return "passed"
    return "skipped" if trouble[0].tag == "skipped" else "failed"


def _order(row: dict[str, Any]) -> tuple[int, str]:
    return row["row"], row["test"]


def page(rows: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    lines = []
    for row in rows:
        *known, told = _cells(row)
        seeds = " and ".join(map(str, row["seeds"]))
        seen = f"{row['date']} at {row['commit']}, by seed {seeds}"
        lines.append(f"| {' | '.join([*known, seen, told.replace('|', '/')])} |\n")
    return _HEAD + "".join(lines)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("row", "fault", "outcome", "recovered after, s", "checks", title="faults")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    recovered = ", ".join(f"{each:.0f}" for each in row["recovered_s"])
    told = "; ".join([*row["why"], *row["checks"]])
    return str(row["row"]), row["fault"], row["outcome"], recovered, told
