"""register: compare the candidate with the champion on the same documents, and promote the better.

The result is never cached, because the champion may have changed since the last run. If the recipe
asks for a user's approval, the stage ends with `needs approval` and a version that is not champion
yet. The stage then runs again with the user's answer, and promotes exactly that version or not.
"""

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.core.errors import UserError
from pipelines.core.product import LOCK, PRODUCT_FILES
from pipelines.core.settings import load_settings
from pipelines.core.storage import one_at_a_time, write_json, write_text
from pipelines.evaluation.gate import Measured, decide, refuse
from pipelines.evaluation.task_scores import check_tasks
from pipelines.export.model_card import model_card
from pipelines.models.model_folder import load_config
from pipelines.recipe.recipe import Recipe
from pipelines.registry import registry
from pipelines.registry.audit import LONGEST_TEXT
from pipelines.registry.comparisons import part_of, take_turn
from pipelines.registry.promotion import ChampionMovedError, challenge, promote, withdraw
from pipelines.registry.registration import SBOM, bill_of_materials, register
from pipelines.run.records import (
    PATCH_FILE,
    TASK_SCORES,
    DatasetRef,
    EvaluateRecord,
    PreprocessRecord,
    RegisterRecord,
    TrainRecord,
    output_folder,
)
from pipelines.run.verdict import Comparison, Turn, Verdict
from pipelines.stages.costs import training_elsewhere
from pipelines.stages.evaluate.right_sizing import served_model
from pipelines.stages.register.answer import Answer
from pipelines.stages.register.comparing import (
    judge_samples,
    keep_scores,
    measure_champion,
    scores_path,
    tasks_path,
    write_page,
)
from pipelines.stages.register.provenance import provenance
from pipelines.tracking.tracked_run import (
    DATASET_TAG,
    MODEL_HASH_TAG,
    TRAINED_HASH_TAG,
    TrackedRun,
    end_run,
    log_dataset,
    open_run,
)

STAGE = RegisterRecord.stage
CARD = "card"  # in the stage's output: the files beside the weights in the registry
BEATEN_TAG = "penstock.champion_bits_per_byte"
COMPARISON_TAG = "penstock.comparison"  # JSON, all the numbers of the verdict
VERDICT_TAG = "penstock.verdict"
_log = logging.getLogger(__name__)


def run(recipe: Recipe, workspace: Path) -> RegisterRecord:
    """Decide, register a candidate that is promoted or needs approval, and write the verdict."""
    output = output_folder(workspace, STAGE)
    shutil.rmtree(output, ignore_errors=True)
    facts = provenance(recipe, workspace)
    with one_at_a_time(_lock(recipe.registration.model_name)), open_run(workspace) as tracked:
        while True:
            try:
                verdict, champion, candidate = _decide(recipe, workspace, facts, tracked)
                break
            except ChampionMovedError as error:
                _log.info("the gate decides again: %s", error)
        _report(tracked, verdict, champion)
        _log_dataset(recipe, workspace, facts, tracked)
    _log.info("%s: %s", verdict.decision, verdict.reason)
    if verdict.warning:
        _log.warning("%s", verdict.warning)
    write_json(output / "verdict.json", verdict.model_dump(mode="json"))
    record = RegisterRecord(
        verdict=verdict,
        model=champion.ref if champion else None,
        candidate=candidate.ref if candidate else None,
    ).write(workspace)
    if tracked.run_id and not record.needs_approval:
        end_run(tracked.run_id, "FINISHED")
    return record


def _decide(
    recipe: Recipe, workspace: Path, facts: dict[str, Any], tracked: TrackedRun
) -> tuple[Verdict, registry.ModelVersion | None, registry.ModelVersion | None]:
    """Return the verdict, the champion after it, and the registered version that isn't champion.

    Raises:
        ChampionMovedError: A user promoted or rolled back a version meanwhile.
    """
    champion, run_id = registry.champion(recipe.registration.model_name), tracked.run_id
    who = f"run {(facts['run'] or {}).get('dag_run_id', run_id)}"
    if champion and (verdict := _own_promotion(workspace, champion, run_id)):
        beaten = _champion_before(champion)
        tracked.log_artifact(write_page(recipe, workspace, facts, verdict, beaten), STAGE)
        # Promote again, to complete the steps after the alias that a crash may have prevented.
        return (
            verdict,
            promote(champion, champion.version, who, verdict.reason[:LONGEST_TEXT]),
            None,
        )
    verdict = _decide_against_champion(recipe, workspace, facts, champion)
    if champion and verdict.comparison:
        found = judge_samples(recipe, facts, champion)
        verdict = verdict.model_copy(update={"judgement": found})
    size = EvaluateRecord.read(workspace).right_size
    if size and size.chosen:
        verdict = verdict.model_copy(update={"reason": f"{verdict.reason}; {size}"})
    answer = Answer.read(workspace)
    if verdict.decision == "promoted" and recipe.registration.needs_approval:
        verdict = _with_consent(verdict, answer, champion)
    # The page comes before an alias moves: if it fails, nothing has been registered.
    tracked.log_artifact(write_page(recipe, workspace, facts, verdict, champion), STAGE)
    if verdict.decision not in ("promoted", "needs approval") and not answer:
        return verdict, champion, None
    candidate = _register(recipe, workspace, facts, verdict, run_id)
    if verdict.decision == "promoted":
        over = champion.version if champion else None
        return verdict, promote(candidate, over, who, verdict.reason[:LONGEST_TEXT]), None
    settle = challenge if verdict.decision == "needs approval" else withdraw
    return verdict, champion, settle(candidate)


def _own_promotion(
    workspace: Path, champion: registry.ModelVersion, run_id: str | None
) -> Verdict | None:
    """Return the verdict of an earlier try of this run, if that has already promoted its model."""
    if run_id is None or champion.run_id != run_id:
        return None
    if champion.model_hash != served_model(workspace)[1]:
        return None
    beaten, compared = champion.tags.get(BEATEN_TAG), champion.tags.get(COMPARISON_TAG)
    found = EvaluateRecord.read(workspace)
    return Verdict(
        decision="promoted",
        reason=champion.description,
        candidate_bits_per_byte=found.bits_per_byte,
        champion_bits_per_byte=float(beaten) if beaten else None,
        comparison=Comparison.model_validate_json(compared) if compared else None,
        probes=found.probes,
    )


def _champion_before(champion: registry.ModelVersion) -> registry.ModelVersion | None:
    """Return the version that a champion replaced; None if there was none or it was deleted."""
    entries = registry.audit_trail(champion.name).entries
    before = next(
        (each.before for each in reversed(entries) if each.after == champion.version), None
    )
    versions = registry.versions_of(champion.name)
    return next((each for each in versions if each.version == before), None)


def _decide_against_champion(
    recipe: Recipe,
    workspace: Path,
    facts: dict[str, Any],
    champion: registry.ModelVersion | None,
) -> Verdict:
    scores = pq.read_table(output_folder(workspace, "evaluate") / "scores.parquet")
    found = EvaluateRecord.read(workspace)
    tasks = _tasks(recipe, workspace)
    drift = None if found.pairs is None else found.pairs.drift
    candidate = Measured(
        served_model(workspace)[1], scores, found.behaviours, tasks, found.probes, drift
    )
    if recipe.registration.require_clean and (facts["run"] or {}).get("dirty", True):
        return refuse(candidate, "register.require_clean: the run has uncommitted changes")
    if alarms := TrainRecord.read(workspace).alarms:
        return refuse(candidate, f"training raised an alarm: {'; '.join(alarms)}")
    if wrong := [str(each) for each in found.served if not each.holds]:
        return refuse(candidate, f"the written model is not the trained one: {'; '.join(wrong)}")
    if found.right_size and found.right_size.refusal:
        return refuse(candidate, f"evaluate.budget_gb: {found.right_size.refusal}")
    if champion is None or champion.model_hash == candidate.model_hash:
        return decide(candidate, candidate if champion else None, recipe.registration, Turn())
    try:
        measured = measure_champion(recipe, workspace, champion, scores["doc_id"])
    except UserError as error:
        _log.warning("champion version %d: %s", champion.version, error, exc_info=True)
        return refuse(
            candidate,
            f"the champion, version {champion.version}, can't be evaluated: {error}; "
            f"run `penstock models rollback {champion.name}` or promote another version",
        )
    # Written down before the verdict is used: a crash must not let a champion meet one more.
    parts = recipe.registration.held_out_parts
    turn = take_turn(champion, candidate.model_hash, scores["doc_id"].to_pylist(), parts)
    ours, theirs = _on_part(candidate, turn), _on_part(measured, turn)
    return decide(ours, theirs, recipe.registration, turn)


def _on_part(measured: Measured, turn: Turn) -> Measured:
    """Return measurements on the held-out documents of a turn's part alone."""
    ids = measured.scores["doc_id"].to_pylist()
    chosen = pa.array([part_of(each, turn.parts) == turn.part for each in ids], pa.bool_())
    return replace(measured, scores=measured.scores.filter(chosen))


def _tasks(recipe: Recipe, workspace: Path) -> pa.Table | None:
    """Return the candidate's results on tasks, if the recipe names some."""
    if not recipe.registration.asked_tasks:
        return None
    found = pq.read_table(output_folder(workspace, EvaluateRecord.stage) / TASK_SCORES)
    check_tasks(found, recipe.registration.asked_tasks)
    return found


def _with_consent(
    verdict: Verdict, answer: Answer | None, champion: registry.ModelVersion | None
) -> Verdict:
    """Return the verdict on a better candidate; an answer about another champion doesn't count."""
    if answer is None or answer.champion != (champion.version if champion else None):
        decision, reason = "needs approval", f"{verdict.reason}; a user must decide"
    elif answer.approved:
        decision, reason = "promoted", f"{verdict.reason}; {answer.words}"
    else:
        decision, reason = "refused", f"{answer.words}; {verdict.reason}"
    return Verdict.model_validate(verdict.model_dump() | {"decision": decision, "reason": reason})


def _register(
    recipe: Recipe,
    workspace: Path,
    facts: dict[str, Any],
    verdict: Verdict,
    run_id: str | None,
) -> registry.ModelVersion:
    train, evaluate = TrainRecord.read(workspace), EvaluateRecord.read(workspace)
    model, model_hash = served_model(workspace)
    preprocess = PreprocessRecord.read(workspace)
    card = output_folder(workspace, STAGE) / CARD
    family = load_config(model).family
    costs = facts["cost"] | ({"train": found} if (found := training_elsewhere(facts)) else {})
    known = facts | {"cost": costs}
    text = model_card(recipe, preprocess, train, evaluate, known, verdict, family)
    write_text(card / "README.md", text)
    write_json(card / registry.LINEAGE, facts)
    write_json(card / SBOM, _bill_of_materials(recipe, preprocess, model_hash, facts))
    if train.adapter is not None:
        shutil.copytree(output_folder(workspace, "train") / train.adapter, card / train.adapter)
    if (workspace / PATCH_FILE).is_file():
        shutil.copyfile(workspace / PATCH_FILE, card / PATCH_FILE)
    scores = pq.read_table(output_folder(workspace, "evaluate") / "scores.parquet")
    keep_scores(scores, scores_path(model_hash, evaluate))
    if (tasks := _tasks(recipe, workspace)) is not None:
        keep_scores(tasks, tasks_path(model_hash, recipe, workspace))
    beaten = verdict.champion_bits_per_byte
    return register(
        [model, card],
        recipe.registration.model_name,
        run_id,
        tags={
            MODEL_HASH_TAG: model_hash,
            TRAINED_HASH_TAG: train.model_hash,
            "penstock.data_hash": evaluate.data_hash,
            **_dataset_tag(preprocess.dataset),
            **_parent_tag(facts["parent"]),
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
    recipe: Recipe, preprocess: PreprocessRecord, model_hash: str, facts: dict[str, Any]
) -> dict[str, Any]:
    made_of = dict([_data(recipe, preprocess.dataset, facts)])
    for parent in _parents(facts["parent"]):
        name = parent.get("model") or Path(parent["folder"]).name
        made_of[name] = str(parent["content"])
    return bill_of_materials(
        recipe.registration.model_name,
        model_hash,
        PRODUCT_FILES / LOCK,
        made_of,
        (facts["run"] or {}).get("git_commit"),
    )


def _dataset_tag(dataset: DatasetRef) -> dict[str, str]:
    """Return the tag by which `penstock data show` finds the models of a dataset version."""
    return {DATASET_TAG: dataset.label} if dataset.label else {}


def _parents(parent: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the base that training started from, and then the model whose adapters went on."""
    return [each for each in (parent, (parent or {}).get("adapter")) if each]


def _parent_tag(parent: dict[str, Any] | None) -> dict[str, str]:
    """Return the tag by which `penstock models list --tree` draws which model came from which.

    Adapters that went on are the nearer parent: the base is theirs, too.
    """
    labels = [each["model"] for each in _parents(parent) if "model" in each]
    return {registry.PARENT_TAG: labels[-1]} if labels else {}


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


def _log_dataset(
    recipe: Recipe, workspace: Path, facts: dict[str, Any], tracked: TrackedRun
) -> None:
    if tracked.run_id is not None:
        dataset = PreprocessRecord.read(workspace).dataset
        name, content = _data(recipe, dataset, facts)
        log_dataset(tracked.run_id, dataset, name, content)


def _data(recipe: Recipe, dataset: DatasetRef, facts: dict[str, Any]) -> tuple[str, str]:
    """Return the name of the data, without a path on a machine, and the hash of its content."""
    origin = recipe.data.source
    name = dataset.label or (Path(origin.path).name if origin.path else origin.kind)
    return name, dataset.directory_hash or str(facts["sha256"]["source.json"])


def _lock(model_name: str) -> Path:
    """Return the lock's path; only one run at a time may read the champion and move the alias."""
    return load_settings().home / "locks" / f"register-{model_name}"
