"""The stage register: add the model to the registry, as champion if it beats the champion."""

from pipelines.stages.stage import Stage

STAGE = Stage(
    name="register",
    does="Compare with the champion: promote, refuse, ask a user, or leave unchanged.",
    inputs=("preprocess", "validate", "train", "evaluate"),
    run="pipelines.stages.register.register_stage:run",
)
