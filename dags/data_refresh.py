"""New data in, a validated dataset version out, on which the recipes that wait for it train.

In Airflow `data_refresh` looks at a source by hand; `<recipe>.refresh` looks at that recipe's, at
the times of `schedule.refresh`. Where the source is as it was when the newest version was made,
all is skipped; else the same stages as in `llm_pipeline`, out of the same cache, make `name@N`.
"""

from pipelines.orchestration.dataset_refresh import PUBLISHED, LookOperator, PublishOperator
from pipelines.orchestration.recipe_dags import refresh_dags
from pipelines.orchestration.stage_task import stage_task

for dag in refresh_dags(__doc__):
    with dag:
        prepare = LookOperator(
            task_id="prepare",
            doc_md="Compare the source with the newest version's: nothing new skips the run.",
        )
        preprocess = stage_task("preprocess", doc_md="As in llm_pipeline, and out of its cache.")
        validate = stage_task(
            "validate",
            doc_md="Great Expectations: also against the newest version, whose statistics drift.",
        )
        publish = PublishOperator(
            task_id="publish",
            outlets=[PUBLISHED],
            doc_md="Push to the DVC remote, commit, tag `name@N`; its event starts training.",
        )

        prepare >> preprocess >> validate >> publish
