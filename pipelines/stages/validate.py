"""The data gate: what preprocess wrote is checked before anything is trained on it."""

import shutil
from pathlib import Path

from pipelines.core.progress import ProgressWriter
from pipelines.core.recipe import Recipe
from pipelines.core.records import PreprocessRecord, ValidateRecord, output_folder
from pipelines.core.storage import read_json
from pipelines.data.tally import STATS
from pipelines.validation import frames, suites
from pipelines.validation.runner import INDEX, SITE, Check, run_checks


def run(recipe: Recipe, workspace: Path) -> ValidateRecord:
    """Check documents, shards, statistics and their record; leave Data Docs either way.

    Raises:
        UserError: an expectation failed; nothing after this stage may use the data.
    """
    output = output_folder(workspace, "validate")
    shutil.rmtree(output, ignore_errors=True)
    progress = ProgressWriter(workspace, "validate")
    checks = _checks(recipe, workspace)
    total = sum(len(check.expectations) for check in checks)
    progress.write(0, total, "expectations", force=True)
    passed = run_checks(checks, output / SITE)
    progress.write(passed, total, "expectations", force=True)
    return ValidateRecord(expectations=passed, data_docs=f"{SITE}/{INDEX}").write(workspace)


def _checks(recipe: Recipe, workspace: Path) -> list[Check]:
    preprocess = output_folder(workspace, "preprocess")
    dataset = PreprocessRecord.read(workspace).dataset
    stats = read_json(preprocess / STATS)
    documents = frames.document_frame(preprocess)
    shards = frames.shard_frame(preprocess, dataset)
    splits = frames.split_frame(dataset, stats, documents, shards)
    return [
        Check("documents", documents, suites.documents_suite(recipe.validation)),
        Check("shards", shards, suites.shards_suite(dataset.vocab_size)),
        Check("splits", splits, suites.splits_suite()),
    ]
