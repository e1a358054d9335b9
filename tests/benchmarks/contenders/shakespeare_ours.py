"""Penstock's recipe `shakespeare-char`: so many steps, and a loss that must be reached."""

from pathlib import Path
from typing import Any

import torch

from pipelines.models.presets import preset
from pipelines.recipe.recipe_files import load_recipe
from pipelines.run.records import Split
from tests.benchmarks.contender import Round, serve
from tests.benchmarks.contenders.our_trainer import build_trainer
from tests.benchmarks.contenders.shakespeare_validation import validate
from tests.settled import FP32

MOST_PARAMETERS = 804_096  # nanoGPT's, positions included


def prepare(folder: Path, options: dict[str, Any]) -> Round:
    torch.set_num_threads(options["threads"])
    recipe = load_recipe("shakespeare-char")
    split = Split.model_validate(options["split"])
    shape = preset(recipe.model.preset).sized(options["vocabulary"], options["block"])
    batch = recipe.data.sequence_length, recipe.train.global_batch_size
    if shape.parameters > MOST_PARAMETERS or batch != (options["block"], options["batch"]):
        raise SystemExit("shakespeare-char is not comparable any more")
    train = recipe.train.model_dump(mode="json") | FP32
    seed = 0

    def run_round() -> tuple[float, dict[str, Any]]:
        nonlocal seed
        sections = {"seed": seed, "train": train}
        seed += 1
        built = build_trainer(folder, split, shape, sections)
        built.trainer.fit()
        loss = validate(folder, options["block"], lambda x, y: built.model(x, None, y))
        if loss > options["loss"]:
            raise SystemExit(f"seed {seed - 1} ends at {loss:.4f}, above {options['loss']}")
        return 1, {"loss": loss, "steps": recipe.train.steps, "parameters": shape.parameters}

    return run_round


if __name__ == "__main__":
    serve(prepare)
