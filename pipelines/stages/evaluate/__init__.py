"""The stage evaluate: how well the model predicts text that it was not trained on."""

from pipelines.stages.stage import Resources, Stage

STAGE = Stage(
    name="evaluate",
    does="Measure bits per byte on held-out documents, beside n-gram and xz; write samples.",
    inputs=("preprocess", "train"),
    run="pipelines.stages.evaluate.evaluation:run",
    publish="pipelines.stages.evaluate.evaluation:publish",
    resources=Resources.GPU_TASKS,
)
