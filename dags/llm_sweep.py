"""One recipe with many sets of overrides: each is trained and evaluated, the best is registered.

The data are made once. A member whose overrides concern the data makes its own. How many members
train at a time is the pool's number of slots.
"""

from airflow.sdk import DAG, TriggerRule, task_group

from pipelines.orchestration.approval import RegisterOperator
from pipelines.orchestration.deadline import deadline
from pipelines.orchestration.stage_task import RETRIES, PrepareOperator, stage_task
from pipelines.orchestration.sweep import (
    BEST,
    MEMBER,
    BestOperator,
    MemberOperator,
    PlanOperator,
    sweep_field,
)
from pipelines.orchestration.temporary_nodes import temporary_nodes
from pipelines.orchestration.trigger_form import trigger_form

with DAG(
    dag_id="llm_sweep",
    description="Train one recipe with many sets of overrides and register the best model",
    schedule=None,
    max_active_runs=2,
    params=sweep_field() | trigger_form(),
    deadline=deadline(),
    default_args=RETRIES,
    tags=["penstock"],
    doc_md=__doc__,
):
    prepare = PrepareOperator(
        task_id="prepare",
        doc_md="Check the recipe, open the sweep's workspace and MLflow run.",
    )
    plan = PlanOperator(
        task_id="plan",
        doc_md="Check each member's overrides before anything is run.",
    )
    preprocess = stage_task(
        "preprocess", doc_md="The data of all members, which find them in the stage cache."
    )
    validate = stage_task("validate", doc_md="The data gate, once for all members.")

    @task_group
    def member(overrides: str) -> None:
        opened = MemberOperator(task_id="prepare", overrides=overrides)
        data = stage_task("preprocess", workspace=MEMBER)
        gate = stage_task("validate", workspace=MEMBER)
        train = stage_task("train", workspace=MEMBER)
        evaluate = stage_task("evaluate", workspace=MEMBER)
        opened >> data >> gate >> train >> evaluate

    best = BestOperator(
        task_id="best",
        trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS,
        doc_md="The fewest bits per byte of held-out text; a member that failed is left out.",
    )
    register = RegisterOperator(
        workspace=BEST,
        doc_md="The best member against the champion.",
    )

    members = member.expand(overrides=plan.output)
    prepare >> plan >> preprocess >> validate >> members >> best >> register
    temporary_nodes(members, members, after=validate)
