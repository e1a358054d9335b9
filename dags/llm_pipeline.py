"""Text in, a registered and evaluated language model out: five stages, one after the other.

In Airflow `llm_pipeline` runs any recipe, by hand. Each recipe of the project has a DAG of its own,
which starts when its section `schedule` says.

Each stage is a folder of `pipelines/stages`, whose `STAGE` says where it runs; its inputs,
parameters and outputs stand in `dvc.yaml`. Where none of them changed, it comes out of the cache.
"""

from pipelines.orchestration.approval import RegisterOperator
from pipelines.orchestration.recipe_dags import recipe_dags
from pipelines.orchestration.stage_task import PrepareOperator, stage_task
from pipelines.orchestration.temporary_nodes import temporary_nodes

for dag in recipe_dags(__doc__):
    with dag:
        prepare = PrepareOperator(
            task_id="prepare",
            doc_md="Check the recipe, clone the project into a workspace, open the MLflow run.",
        )
        preprocess = stage_task("preprocess")
        validate = stage_task("validate")
        train = stage_task("train")
        evaluate = stage_task("evaluate")
        register = RegisterOperator()

        prepare >> preprocess >> validate >> train >> evaluate >> register
        temporary_nodes(train, evaluate, after=validate)
