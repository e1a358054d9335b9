"""validate: the data gate; nothing is trained on data that fail an expectation."""

from pipelines.stages.stage import Stage

STAGE = Stage(
    name="validate",
    does="Great Expectations: a failing expectation stops the run before a GPU is asked for.",
    inputs=("preprocess",),
    run="pipelines.stages.validate.data_gate:run",
    publish="pipelines.stages.validate.data_gate:publish",
)
