"""The data gate, which checks the output of preprocess before a model is trained on it."""

import shutil
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.storage import write_text
from pipelines.recipe.recipe import Recipe
from pipelines.run.progress import ProgressWriter
from pipelines.run.records import (
    DATA_DOCS,
    ExpectationResult,
    ValidateRecord,
    output_folder,
)
from pipelines.run.workspace import Run
from pipelines.tracking.tracked_run import DATA_DOCS_TAG, data_docs_address, open_run
from pipelines.validation.data_checks import build_checks
from pipelines.validation.data_docs_page import render_page
from pipelines.validation.quarantine import QUARANTINE, write_quarantine
from pipelines.validation.runner import Finding, run_check


def run(recipe: Recipe, workspace: Path) -> ValidateRecord:
    """Check documents, shards, statistics and their record.

    Data Docs, and a file of bad documents if there are any, are written even if a check fails.

    Raises:
        UserError: An expectation failed; no later stage may use the data.
    """
    output = output_folder(workspace, ValidateRecord.stage)
    shutil.rmtree(output, ignore_errors=True)
    findings, quarantined = _hold(recipe, workspace, output)
    publish(workspace)
    _refuse(findings, output, quarantined)
    return ValidateRecord(
        expectations=len(findings),
        data_docs=DATA_DOCS,
        results=tuple(_result(finding) for finding in findings),
        quarantined=quarantined,
    ).write(workspace)


def publish(workspace: Path) -> None:
    """Log Data Docs and the bad documents to the workspace's MLflow run, and tag it with the page.

    This is also called for restored outputs.
    """
    output = output_folder(workspace, ValidateRecord.stage)
    with open_run(workspace) as tracked:
        if tracked.run_id is None:
            return
        tracked.log_artifact(output / DATA_DOCS, str(Path(DATA_DOCS).parent))
        if (output / QUARANTINE).is_file():
            tracked.log_artifact(output / QUARANTINE, ValidateRecord.stage)
        if page := Run.read(workspace).mlflow_address:
            tracked.set_tags({DATA_DOCS_TAG: data_docs_address(page)})


def _hold(recipe: Recipe, workspace: Path, output: Path) -> tuple[list[Finding], int]:
    """Run every check and write Data Docs; write the bad documents too, and count them."""
    progress = ProgressWriter(workspace, ValidateRecord.stage)
    checks = build_checks(recipe, workspace)
    total = sum(len(check.expectations) for check in checks)
    findings: list[Finding] = []
    results = []
    for check in checks:
        progress.write(len(findings), total, "expectations", force=True)
        found, result = run_check(check)
        findings += found
        results.append((check, result))
    progress.write(total, total, "expectations", force=True)
    quarantined = write_quarantine(findings, output / QUARANTINE)
    note = f"{QUARANTINE} names {quarantined} bad documents." if quarantined else ""
    write_text(output / DATA_DOCS, render_page(results, note))
    return findings, quarantined


def _refuse(findings: list[Finding], output: Path, quarantined: int) -> None:
    failures = [finding.describe() for finding in findings if not finding.success]
    if not failures:
        return
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    bad = f"; bad documents: {output / QUARANTINE}" if quarantined else ""
    raise UserError(f"{failures[0]}{more}; see {output / DATA_DOCS}{bad}")


def _result(finding: Finding) -> ExpectationResult:
    return ExpectationResult(
        check=finding.check.name,
        expectation=finding.expectation.expectation_type,
        columns=finding.columns,
        observed=finding.observed,
    )
