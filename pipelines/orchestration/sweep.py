"""The operators of `llm_sweep`: one recipe with many sets of overrides, and the best continues.

The sweep's own workspace makes the data once, so that the stage cache has them for every member. A
member is a whole run of the pipeline up to *evaluate*, in its own workspace and MLflow run, which
MLflow shows below the sweep's run.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, Param

from pipelines.core.errors import UserError
from pipelines.core.settings import PROJECT, load_settings
from pipelines.core.storage import read_json
from pipelines.orchestration.links import MlflowRunLink
from pipelines.orchestration.naming import keep_members, member_name, members
from pipelines.orchestration.task_liveness import map_index_of
from pipelines.orchestration.trigger_form import PREPARED, mistakes_fail_the_task
from pipelines.recipe.recipe_files import override_values, parse_overrides, with_absolute_paths
from pipelines.registry.parents import Settled, settle_run, with_folders
from pipelines.run.records import EvaluateRecord, record_path
from pipelines.run.workspace import Run, read_recipe
from pipelines.stage_cache.open_workspace import open_workspace
from pipelines.stages.run_tracking import open_tracking
from pipelines.tracking.rest import set_tags

if TYPE_CHECKING:
    from airflow.sdk import Context

    from pipelines.recipe.recipe import Recipe

SWEEP = "sweep"  # the form's field
# Templates instead of XComArgs, so that the graph shows a chain.
MEMBER = "{{ ti.xcom_pull(task_ids='member.prepare', map_indexes=ti.map_index) }}"
BEST = "{{ ti.xcom_pull(task_ids='best') }}"
OVERRIDES_TAG = "penstock.overrides"
BEST_TAG = "penstock.best_run"


def sweep_field() -> dict[str, Param]:
    """Return the field of the trigger form that makes a run a sweep."""
    return {
        SWEEP: Param(
            "train.lr=1e-3\ntrain.lr=3e-3",
            type="string",
            format="multiline",
            minLength=1,
            section="Sweep",
            description="One member per line, with its overrides separated by `;`: "
            "`train.lr=1e-3; train.steps=800`",
        )
    }


class PlanOperator(BaseOperator):
    """Reads the members from the form and checks each member's recipe before any runs."""

    template_fields = ("workspace",)

    def __init__(self, *, workspace: str = PREPARED, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.workspace = workspace

    def execute(self, context: "Context") -> list[str]:
        """Return the overrides of each member."""
        workspace = Path(self.workspace)
        with mistakes_fail_the_task(self.task_id, Run.read(workspace).dag_run_id):
            lines = list(dict.fromkeys(filter(None, map(str.strip, _text(context).splitlines()))))
            if not lines:
                raise UserError(f"{SWEEP}: there is no member; give one set of overrides per line")
            # Do not import these when the DAG file is parsed.
            from pipelines.stages.beforehand import CHECKS, check_beforehand

            for line in lines:
                check_beforehand(_settled(workspace, line), CHECKS)
        keep_members(workspace, lines)
        return lines


class MemberOperator(BaseOperator):
    """Opens a member: its recipe, its workspace and its MLflow run below the sweep's."""

    template_fields = ("overrides", "workspace")
    operator_extra_links = (MlflowRunLink(),)

    def __init__(self, *, overrides: str, workspace: str = PREPARED, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.overrides = overrides
        self.workspace = workspace
        self.links: dict[str, str] = {}

    def execute(self, context: "Context") -> str:
        """Return the member's workspace."""
        sweep = Path(self.workspace)
        name = member_name(sweep, map_index_of(context))
        with mistakes_fail_the_task(self.task_id, name):
            from pipelines.orchestration.cluster_plan import settle_on_cluster
            from pipelines.stages.beforehand import CHECKS, check_beforehand

            run = settle_run(_recipe(sweep, self.overrides))
            check_beforehand(run, CHECKS)
            settings = load_settings()
            run = settle_on_cluster(settings, run)
            workspace = open_workspace(
                PROJECT, settings.home, name, run.recipe, run.source, ready=run.ready
            )
        address = open_tracking(workspace, sweep, {OVERRIDES_TAG: self.overrides})
        MlflowRunLink().show(self, context, address)
        self.log.info("%s: workspace %s, MLflow run %s", self.overrides, workspace, address)
        return str(workspace)


class BestOperator(BaseOperator):
    """Chooses the member with the fewest bits per byte of held-out text; some may have failed."""

    template_fields = ("workspace",)

    def __init__(self, *, workspace: str = PREPARED, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.workspace = workspace

    def execute(self, context: "Context") -> str:  # noqa: ARG002 (Airflow's signature)
        """Return the workspace of the best member."""
        sweep = Path(self.workspace)
        scores = {
            workspace: EvaluateRecord.read(workspace).bits_per_byte
            for workspace in members(sweep)
            if record_path(workspace, EvaluateRecord.stage).is_file()
        }
        if not scores:
            raise RuntimeError("no member of the sweep was evaluated; see their tasks")
        for workspace, bits in sorted(scores.items(), key=lambda pair: pair[1]):
            self.log.info("%.4f bits per byte: %s", bits, workspace.name)
        best = min(scores, key=scores.__getitem__)
        _show_best(sweep, best)
        return str(best)


def _settled(sweep: Path, overrides: str) -> Settled:
    """Return what a member starts from; data that are the sweep's are not read once more."""
    recipe = _recipe(sweep, overrides)
    if recipe.data != read_recipe(sweep).data:
        return settle_run(recipe)
    return Settled(recipe, with_folders(recipe), read_json(sweep / "source.json"))


def _recipe(sweep: Path, overrides: str) -> "Recipe":
    return with_absolute_paths(
        override_values(read_recipe(sweep), parse_overrides(overrides)), PROJECT
    )


def _text(context: "Context") -> str:
    conf = context["dag_run"].conf or {}
    return str(conf.get(SWEEP) or context["params"][SWEEP])


def _show_best(sweep: Path, best: Path) -> None:
    ours, theirs = Run.read(sweep).mlflow_run_id, Run.read(best).mlflow_run_id
    if ours and theirs:
        set_tags(ours, {BEST_TAG: theirs})
