"""Register: the candidate meets the champion on the same documents and replaces it, or does not.

Never cached: the champion may have changed since the last run. Where the recipe wants a person's
consent, the stage ends with `needs approval` and a version that is not champion yet; run again with
the answer, it promotes just that version, or leaves it.
"""

import fcntl
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from pipelines.core.errors import UserError
from pipelines.core.recipe import Recipe
from pipelines.core.records import (
    PATCH_FILE,
    DatasetRef,
    EvaluateRecord,
    PreprocessRecord,
    RegisterRecord,
    TrainRecord,
    output_folder,
)
from pipelines.core.settings import PROJECT, load_settings
from pipelines.core.storage import write_json, write_text
from pipelines.core.verdict import BehaviourScore, Comparison, Verdict
from pipelines.data.documents import documents_folder, split_files
from pipelines.data.splitting import VALIDATION
from pipelines.evaluation.gate import Measured, decide, refuse
from pipelines.export.model_card import model_card
from pipelines.models.folder import load_config
from pipelines.stages.approval import Answer
from pipelines.tracking import registry
from pipelines.tracking.audit import LONGEST_TEXT
from pipelines.tracking.lineage import lineage
from pipelines.tracking.promotion import ChampionMovedError, challenge, promote, withdraw
from pipelines.tracking.registration import register
from pipelines.tracking.run import DATASET_TAG, TrackedRun, open_run
from pipelines.tracking.sbom import SBOM, bill_of_materials

STAGE = RegisterRecord.stage
SCORES = "scores"  # under the home: <model hash>/<documents>.parquet, shared by all runs
CARD = "card"  # in the stage's output: what lies beside the weights in the registry
BEATEN_TAG = "penstock.champion_bits_per_byte"
COMPARISON_TAG = "penstock.comparison"  # JSON, all the numbers of the verdict
VERDICT_TAG = "penstock.verdict"
_log = logging.getLogger(__name__)


def run(recipe: Recipe, workspace: Path) -> RegisterRecord:
    """Decide, register what is promoted or awaits a person, and write the verdict."""
    output = output_folder(workspace, STAGE)
    shutil.rmtree(output, ignore_errors=True)
    facts = lineage(workspace)
    with _one_at_a_time(recipe.registration.model_name), open_run(workspace) as tracked:
        while True:
            try:
                verdict, champion, candidate = _decide(recipe, workspace, facts, tracked.run_id)
                break
            except ChampionMovedError as error:
                _log.info("decided anew: %s", error)
        _report(tracked, verdict, champion)
    _log.info("%s: %s", verdict.decision, verdict.reason)
    write_json(output / "verdict.json", verdict.model_dump(mode="json"))
    return RegisterRecord(
        verdict=verdict,
        model=champion.ref if champion else None,
        candidate=candidate.ref if candidate else None,
    ).write(workspace)


def _decide(
    recipe: Recipe, workspace: Path, facts: dict[str, Any], run_id: str | None
) -> tuple[Verdict, registry.ModelVersion | None, registry.ModelVersion | None]:
    """The verdict, who is champion after it, and the version that is left without the alias.

    Raises:
        ChampionMovedError: a person promoted or rolled back meanwhile.
    """
    champion = registry.champion(recipe.registration.model_name)
    verdict = _own_promotion(workspace, champion, run_id)
    if verdict:
        return verdict, champion, None
    verdict = _judge(recipe, workspace, facts, champion)
    answer = Answer.read(workspace)
    if verdict.decision == "promoted" and recipe.registration.needs_approval:
        verdict = _with_consent(verdict, answer, champion)
    if verdict.decision not in ("promoted", "needs approval") and not answer:
        return verdict, champion, None
    candidate = _register(recipe, workspace, facts, verdict, run_id)
    if verdict.decision == "promoted":
        over = champion.version if champion else None
        who = f"run {(facts['run'] or {}).get('dag_run_id', run_id)}"
        return verdict, promote(candidate, over, who, verdict.reason[:LONGEST_TEXT]), None
    settle = challenge if verdict.decision == "needs approval" else withdraw
    return verdict, champion, settle(candidate)


def _own_promotion(
    workspace: Path, champion: registry.ModelVersion | None, run_id: str | None
) -> Verdict | None:
    """The verdict of an earlier try of this very run, which had promoted its model already."""
    if champion is None or run_id is None or champion.run_id != run_id:
        return None
    if champion.model_hash != TrainRecord.read(workspace).model_hash:
        return None
    beaten, compared = champion.tags.get(BEATEN_TAG), champion.tags.get(COMPARISON_TAG)
    return Verdict(
        decision="promoted",
        reason=champion.description,
        candidate_bits_per_byte=EvaluateRecord.read(workspace).bits_per_byte,
        champion_bits_per_byte=float(beaten) if beaten else None,
        comparison=Comparison.model_validate_json(compared) if compared else None,
    )


def _judge(
    recipe: Recipe,
    workspace: Path,
    facts: dict[str, Any],
    champion: registry.ModelVersion | None,
) -> Verdict:
    scores = pq.read_table(output_folder(workspace, "evaluate") / "scores.parquet")
    if recipe.registration.require_clean and (facts["run"] or {}).get("dirty", True):
        return refuse(scores, "register.require_clean: the run is of uncommitted changes")
    behaviours = EvaluateRecord.read(workspace).behaviours
    candidate = Measured(TrainRecord.read(workspace).model_hash, scores, behaviours)
    if champion is None or champion.model_hash == candidate.model_hash:
        return decide(candidate, candidate if champion else None, recipe.registration)
    try:
        measured = _measure_champion(recipe, workspace, champion, scores["doc_id"])
    except UserError as error:
        _log.warning("champion version %d: %s", champion.version, error, exc_info=True)
        return refuse(
            scores,
            f"the champion, version {champion.version}, can't be evaluated: {error}; "
            f"`penstock models rollback {champion.name}`, or promote another, to go on",
        )
    return decide(candidate, measured, recipe.registration)


def _with_consent(
    verdict: Verdict, answer: Answer | None, champion: registry.ModelVersion | None
) -> Verdict:
    """What becomes of a better candidate; an answer about another champion is none."""
    if answer is None or answer.champion != (champion.version if champion else None):
        decision, reason = "needs approval", f"{verdict.reason}; a person decides"
    elif answer.approved:
        decision, reason = "promoted", f"{verdict.reason}; {answer.words}"
    else:
        decision, reason = "refused", f"{answer.words}; {verdict.reason}"
    return Verdict.model_validate(verdict.model_dump() | {"decision": decision, "reason": reason})


def _measure_champion(
    recipe: Recipe,
    workspace: Path,
    champion: registry.ModelVersion,
    doc_ids: pa.ChunkedArray,
) -> Measured:
    scores = _champion_scores(workspace, champion, doc_ids)
    behaviours: tuple[BehaviourScore, ...] = ()
    if tests := recipe.evaluate.behaviour:
        from pipelines.evaluation.behaviour import run_tests  # imports torch

        folder = registry.download(champion.name, str(champion.version))
        behaviours = run_tests(folder, tests, recipe.evaluate.stride)
    return Measured(champion.model_hash, scores, behaviours)


def _champion_scores(
    workspace: Path, champion: registry.ModelVersion, doc_ids: pa.ChunkedArray
) -> pa.Table:
    """The champion's scores of these documents, computed once for all runs."""
    evaluate = EvaluateRecord.read(workspace)
    kept = _scores_path(champion.model_hash, evaluate)
    if kept.is_file():
        return pq.read_table(kept)
    from pipelines.evaluation.documents import each_once
    from pipelines.evaluation.perplexity import score_documents  # imports torch

    preprocess = output_folder(workspace, PreprocessRecord.stage)
    folders = PreprocessRecord.read(workspace).dataset.folders
    files = [
        path
        for folder in folders
        for path in split_files(documents_folder(preprocess / folder), VALIDATION)
    ]
    found = ds.dataset(files).to_table(filter=pc.field("doc_id").isin(doc_ids))
    documents = each_once([found])
    folder = registry.download(champion.name, str(champion.version))
    _log.info("scoring champion version %d on %d documents", champion.version, len(documents))
    scores = score_documents(folder, documents, evaluate.stride)
    _keep_scores(scores, kept)
    return scores


def _register(
    recipe: Recipe,
    workspace: Path,
    facts: dict[str, Any],
    verdict: Verdict,
    run_id: str | None,
) -> registry.ModelVersion:
    train, evaluate = TrainRecord.read(workspace), EvaluateRecord.read(workspace)
    preprocess = PreprocessRecord.read(workspace)
    card = output_folder(workspace, STAGE) / CARD
    family = load_config(output_folder(workspace, "train") / train.model).family
    text = model_card(recipe, preprocess, train, evaluate, facts["run"] or {}, family)
    write_text(card / "README.md", text)
    write_json(card / "lineage.json", facts)
    write_json(card / SBOM, _bill_of_materials(recipe, preprocess, train, facts))
    if train.adapter is not None:
        shutil.copytree(output_folder(workspace, "train") / train.adapter, card / train.adapter)
    if (workspace / PATCH_FILE).is_file():
        shutil.copyfile(workspace / PATCH_FILE, card / PATCH_FILE)
    scores = pq.read_table(output_folder(workspace, "evaluate") / "scores.parquet")
    _keep_scores(scores, _scores_path(train.model_hash, evaluate))
    beaten = verdict.champion_bits_per_byte
    return register(
        [output_folder(workspace, "train") / train.model, card],
        recipe.registration.model_name,
        run_id,
        tags={
            registry.MODEL_HASH_TAG: train.model_hash,
            "penstock.data_hash": evaluate.data_hash,
            **_dataset_tag(preprocess.dataset),
            "penstock.bits_per_byte": repr(evaluate.bits_per_byte),
            BEATEN_TAG: "" if beaten is None else repr(beaten),
            COMPARISON_TAG: verdict.comparison.model_dump_json() if verdict.comparison else "",
            VERDICT_TAG: verdict.decision,
            "penstock.recipe": recipe.name,
            "penstock.recipe_fingerprint": recipe.fingerprint(),
            "penstock.git_commit": str((facts["run"] or {}).get("git_commit")),
        },
        description=verdict.reason,
    )


def _bill_of_materials(
    recipe: Recipe, preprocess: PreprocessRecord, train: TrainRecord, facts: dict[str, Any]
) -> dict[str, Any]:
    dataset, environment = preprocess.dataset, facts["environment"] or {}
    origin = recipe.data.source
    name = dataset.label or (Path(origin.path).name if origin.path else origin.kind)
    source = dataset.directory_hash or str(facts["sha256"]["source.json"])
    made_of = {name: source}
    if recipe.model.init_from:
        made_of[Path(recipe.model.init_from).name] = str(environment.get("init_from"))
    return bill_of_materials(
        recipe.registration.model_name,
        train.model_hash,
        PROJECT / "requirements.lock",
        made_of,
        (facts["run"] or {}).get("git_commit"),
    )


def _dataset_tag(dataset: DatasetRef) -> dict[str, str]:
    """By which `penstock data show` finds the models of a version."""
    return {DATASET_TAG: dataset.label} if dataset.label else {}


def _report(tracked: TrackedRun, verdict: Verdict, champion: registry.ModelVersion | None) -> None:
    version = f"{champion.name}/{champion.version}" if champion else "none"
    tracked.set_tags(
        {
            VERDICT_TAG: verdict.decision,
            "penstock.verdict_reason": verdict.reason,
            "penstock.champion": version,
        }
    )
    tracked.log_results(verdict.figures())


def _scores_path(model_hash: str, evaluate: EvaluateRecord) -> Path:
    name = f"{evaluate.data_hash}-stride-{evaluate.stride:g}.parquet"
    return load_settings().home / SCORES / model_hash / name


def _keep_scores(scores: pa.Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    pq.write_table(scores, temporary)
    temporary.replace(path)


@contextmanager
def _one_at_a_time(model_name: str) -> Iterator[None]:
    """Between reading the champion and moving the alias no other run may do either."""
    path = load_settings().home / "locks" / f"register-{model_name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
