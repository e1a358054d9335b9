"""The stage validate: the data gate, which stops a run whose data fail an expectation."""

from pipelines.stages.stage import Stage

STAGE = Stage(
    name="validate",
    does="Check the data with Great Expectations; a failure stops the run before it asks for GPUs.",
    inputs=("preprocess",),
    run="pipelines.stages.validate.data_gate:run",
    publish="pipelines.stages.validate.data_gate:publish",
)
