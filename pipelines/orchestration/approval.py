"""The register task: if the recipe requires a user's approval, it asks for it and waits.

While it waits it holds no worker slot. A user answers on the task's page in Airflow (Required
Actions) or by Airflow's REST API; without an answer in time the candidate is refused.
"""

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import Asset, AssetAlias

from pipelines.core.settings import load_settings
from pipelines.orchestration.naming import champion_asset
from pipelines.orchestration.stage_task import StageOperator, outcome
from pipelines.run.logbook import Entry, note
from pipelines.run.records import (
    EvaluateRecord,
    ModelRef,
    RegisterRecord,
    TrainRecord,
)
from pipelines.run.workspace import Run, read_recipe
from pipelines.stages.register import STAGE
from pipelines.stages.register.answer import Answer, forget_answer
from pipelines.tracking.tracked_run import data_docs_address

if TYPE_CHECKING:
    from airflow.sdk import Context

# Stands for the asset of one model, whose name is known only when a version is promoted.
PROMOTED = AssetAlias("promoted_model")


class RegisterOperator(StageOperator, ApprovalOperator):
    """The register stage, with a user's approval between its two halves if the recipe says so.

    The stage decides; `needs approval` parks the task. With the answer in the workspace the stage
    runs again and promotes exactly the model that was shown, or none. If a try fails after the
    answer, the next try finds it; if a user clears the finished task, it asks again.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            subject="Should the candidate become the champion?",
            defaults=ApprovalOperator.REJECT,
            **({"task_id": STAGE.name, "doc_md": STAGE.does, "outlets": [PROMOTED]} | kwargs),
        )

    def execute(self, context: "Context") -> Any:
        """Decide, and wait for the answer if one is needed."""
        with self.at_work(context) as workspace:
            cached = self.run_stage(workspace)
            record = RegisterRecord.read(workspace)
            if not record.needs_approval:
                return self._end(context, record, cached=cached)
            registration = read_recipe(workspace).registration
            self.subject = f"Should {_name(record.candidate)} become the champion?"
            self.body = comparison(workspace, registration.approval_hours)
            self.response_timeout = timedelta(hours=registration.approval_hours)
            return ApprovalOperator.execute(self, context)  # parks the task

    def execute_complete(self, context: "Context", event: dict[str, Any]) -> Any:
        """Continue with the answer, in a new process."""
        ApprovalOperator.execute_complete(self, context, event)
        with self.at_work(context) as workspace:
            self._keep(event, context["ti"].try_number)
            cached = self.run_stage(workspace)
            record = RegisterRecord.read(workspace)
            if record.needs_approval:
                # Fail, because Airflow shows a changed question only in a new try.
                raise RuntimeError("the champion changed meanwhile; the question is asked again")
            return self._end(context, record, cached=cached)

    def _end(self, context: "Context", record: RegisterRecord, *, cached: bool) -> dict[str, Any]:
        """Announce a new champion: Airflow sends the event when this task has succeeded."""
        forget_answer(Path(self.workspace))
        if record.model and record.verdict.decision == "promoted":
            asset = Asset(champion_asset(record.model.name))
            extra: dict[str, Any] = {"version": record.model.version}
            context["outlet_events"][PROMOTED].add(asset, extra=extra)
        return outcome(self.stage, cached=cached)

    def _keep(self, event: dict[str, Any], try_number: int) -> None:
        """Write the answer into the stage's file and into the logbook."""
        workspace = Path(self.workspace)
        record = RegisterRecord.read(workspace)
        if record.candidate is None:
            return
        user = event["responded_by_user"]
        answer = Answer(
            approved=event["chosen_options"] == [ApprovalOperator.APPROVE],
            by=user["name"] if user else None,
            at=event["responded_at"].isoformat(),
            candidate=record.candidate.version,
            champion=record.model.version if record.model else None,
        ).write(workspace)
        entry = Entry(
            kind="human decision",
            key=f"answer to try {try_number} of {self.task_id}",
            stage=self.stage,
            cause=f"{_name(record.candidate)} was {answer.words} at {answer.at}",
            done="it becomes the champion" if answer.approved else "the champion stays",
        )
        note(workspace, entry)


def comparison(workspace: Path, hours: float) -> str:
    """Return what a user needs to decide, as Markdown: the scores side by side, and links."""
    register, train = RegisterRecord.read(workspace), TrainRecord.read(workspace)
    evaluate, run = EvaluateRecord.read(workspace), Run.read(workspace)
    verdict = register.verdict
    theirs = verdict.champion_bits_per_byte
    baselines = ", ".join(f"{name} {bits:.3f}" for name, bits in evaluate.baselines.items())
    rows = [
        f"| | candidate: {_link(register.candidate)} | champion: {_link(register.model)} |",
        "|---|--:|--:|",
        f"| bits per byte of held-out text | **{verdict.candidate_bits_per_byte:.4f}** "
        f"| {'' if theirs is None else f'{theirs:.4f}'} |",
        f"| perplexity per token | {evaluate.perplexity:.2f} | |",
        f"| parameters | {train.parameters:,} | |",
        f"| trained on | {train.tokens:,} tokens in {train.steps:,} steps | |",
    ]
    facts = [
        f"Gate: {verdict.reason}.",
        *([f"**Warning:** {verdict.warning}."] if verdict.warning else []),
        f"Held out: {evaluate.documents:,} documents, {evaluate.bytes:,} bytes. "
        f"On the same text: {baselines}.",
        f"Recipe {run.recipe_fingerprint}, commit {run.git_commit[:12]}"
        + (" with uncommitted changes." if run.dirty else "."),
        f"Without an answer within {hours:g} hours the candidate is refused.",
    ]
    return "\n\n".join(["\n".join(rows), *facts, _pages(run.mlflow_address)])


def _pages(address: str | None) -> str:
    if address is None:
        return ""
    report = f"{address}/artifacts/evaluate/report.html"
    return (
        f"[MLflow run]({address}) · [evaluation report]({report}) "
        f"· [Data Docs]({data_docs_address(address)})"
    )


def _name(model: ModelRef | None) -> str:
    return f"{model.name} version {model.version}" if model else "none"


def _link(model: ModelRef | None) -> str:
    if model is None:
        return "none"
    page = f"{load_settings().mlflow_url}/#/models/{model.name}/versions/{model.version}"
    return f"[version {model.version}]({page.replace(' ', '%20')})"
