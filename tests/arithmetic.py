"""A toy for learning from rewards: sums of small numbers, and a model that mostly guesses them."""

import json
import random
from pathlib import Path

from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import load_recipe
from pipelines.registry.parents import with_own_tokenizer
from pipelines.run.records import output_folder
from pipelines.stages.preprocess import preprocessing
from pipelines.stages.train import train_stage

QUESTIONS = [(a, b) for a in range(5) for b in range(5)]
COMMON = [
    "data.source.kind=files",
    "data.instruction.kind=prompt_response",
    "data.sequence_length=32",
    "resources.workers=1",
]


def write_sums(path: Path, spellings: int, right: float, seed: int = 0) -> None:
    """Each sum in several spellings, with the right answer so often, and else with any digit."""
    draw = random.Random(seed)
    lines = []
    for spelling in range(spellings):
        for a, b in QUESTIONS:
            answer = a + b if draw.random() < right else draw.randrange(10)
            prompt = f"{a}+{b}={'?' * spelling}"
            lines.append(json.dumps({"prompt": prompt, "response": str(answer)}))
    path.write_text("\n".join(lines))


def make_guesser(folder: Path) -> Path:
    """Train a model to answer with a digit, of which a seventh are right, and return its folder."""
    write_sums(folder / "guesses.jsonl", spellings=16, right=0.05)
    recipe = load_recipe(
        "debug",
        [
            *COMMON,
            f"data.source.path={folder / 'guesses.jsonl'}",
            "data.tokenizer.vocab_size=300",
            "data.packing=best_fit",
            "data.document_mask=true",
            "model.preset=llama-100k",
            "train.steps=60",
            "train.lr=3e-3",
            "train.global_batch_size=32",
            "train.micro_batch_size=32",
        ],
    )
    preprocessing.run(recipe, folder / "guesser")
    record = train_stage.run(recipe, folder / "guesser")
    assert record is not None
    return output_folder(folder / "guesser", "train") / record.model


def reinforced(folder: Path, guesser: Path, *overrides: str) -> list[str]:
    """The overrides of `debug` that teach the guesser by rewards; the data are made."""
    write_sums(folder / "sums.jsonl", spellings=4, right=1.0)
    return [
        *COMMON,
        f"data.source.path={folder / 'sums.jsonl'}",
        "data.tokenizer.kind=model",
        f"model.init_from={guesser}",
        "train.lr=5e-4",
        "train.warmup_steps=5",
        "train.weight_decay=0",
        "train.global_batch_size=256",
        "train.micro_batch_size=256",
        "train.log_every=10",
        "reinforcement.kind=grpo",
        "reinforcement.answers=16",
        "reinforcement.max_tokens=4",
        "reinforcement.rewards=[{name: exact_match}]",
        "reinforcement.kl=0.01",
        "reinforcement.max_drift=5",
        *overrides,
    ]


def prepared(folder: Path, overrides: list[str]) -> tuple[Recipe, Path]:
    """A run up to its training."""
    recipe = load_recipe("debug", overrides)
    preprocessing.run(with_own_tokenizer(recipe), folder)
    return recipe, folder
