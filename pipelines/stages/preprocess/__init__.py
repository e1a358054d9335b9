"""The stage preprocess: from text to documents without duplicates, a tokenizer and token shards."""

from pipelines.stages.stage import Resources, Stage

STAGE = Stage(
    name="preprocess",
    does="Read, normalise, drop duplicates, train the tokenizer and write shards, with Ray Data.",
    inputs=(),
    run="pipelines.stages.preprocess.preprocessing:run",
    resources=Resources.CPU_TASKS,
)
