"""preprocess: text in; documents without duplicates, a tokenizer and token shards out."""

from pipelines.stages.stage import Resources, Stage

STAGE = Stage(
    name="preprocess",
    does="Ray Data: read, normalise, drop duplicates, train the tokenizer, write shards.",
    inputs=(),
    run="pipelines.stages.preprocess.preprocessing:run",
    resources=Resources.CPU_TASKS,
)
