"""The first losses of each shipped recipe's tiny twin, kept so that no change alters them unseen.

A twin has the recipe's optimisation, its adapter and the kind of its model, but a few thousand
parameters, and data made up here. After a change that is meant to alter the losses:

    .venv/bin/python -m tests.golden.losses [RECIPE ...]
"""

import json
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from pipelines.data.tokens.token_shards import ShardWriter
from pipelines.loading.dataloader import TokenLoader
from pipelines.loading.token_dataset import TokenDataset
from pipelines.models.config import DecoderConfig
from pipelines.models.initial_model import build_model
from pipelines.models.peft_format import fill_adapters
from pipelines.models.presets import preset
from pipelines.models.pretrained import load_weights, save_pretrained
from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import Layout
from pipelines.parallel.mesh import build_mesh
from pipelines.parallel.parallelize import parallelize
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import load_recipe, override_values, shipped_recipes
from pipelines.run.records import Split
from pipelines.training.reference import use_reference
from pipelines.training.trainer import Trainer
from tests.distributed.training import make_pairs

FOLDER = Path(__file__).parent
STEPS = 12
LENGTH = 16
VOCABULARY = 128
TWIN = {
    "data.sequence_length": LENGTH,
    "data.tokenizer.kind": "byte",
    "model.init_from": None,
    "parallel": {},
    "train.steps": STEPS,
    "train.max_seconds": None,
    "train.warmup_steps": 3,
    "train.micro_batch_size": 2,
    "train.global_batch_size": 4,
    "train.precision": "fp32",
    "train.compile": False,
    "train.checkpoints": None,
    "train.checkpoint_every": STEPS,
    "train.log_every": 1,
    "adapter.init_from": None,
    "resources.workers": 1,
}


def twin_shape(full: DecoderConfig) -> DecoderConfig:
    """The same kind of decoder in small."""
    return replace(
        full,
        layers=2,
        width=32,
        heads=4,
        kv_heads=max(1, 4 * full.kv_heads // full.heads),
        head_dim=None if full.head_dim is None else 8,
        hidden=64,
        vocab_size=VOCABULARY,
        context_length=LENGTH,
        sliding_window=None if full.sliding_window is None else LENGTH // 2,
    )


def make_data(folder: Path, *, masked: bool) -> Split:
    """Forty documents in which each token mostly follows from the one before."""
    random = np.random.Generator(np.random.PCG64(0))
    writer = ShardWriter(folder / "train-00000", VOCABULARY, masked=masked)
    tokens = 0
    for _ in range(40):
        length = int(random.integers(20, 80))
        steps = np.where(random.random(length) < 0.8, 7, random.integers(0, VOCABULARY, length))
        document = (np.cumsum(steps) % VOCABULARY).astype(np.uint16)
        mask = (np.arange(length) > length // 3).astype(np.uint8) if masked else None
        writer.add(document, mask=mask)
        tokens += length
    return Split(documents=40, bytes=tokens, tokens=tokens, shards=(writer.close(),))


def losses(recipe: Recipe, folder: Path) -> list[float]:
    """Nats a token of each step of the recipe's twin."""
    twin = override_values(recipe, TWIN)
    masked, pairs = twin.data.instruction.is_chat, twin.preference.kind != "none"
    split = make_pairs(folder) if pairs else make_data(folder, masked=masked)
    dataset = TokenDataset(folder, split, LENGTH, documents=twin.data.document_mask)
    mesh = build_mesh(Layout(), torch.device("cpu"))
    loader = TokenLoader.of(dataset, twin, mesh)
    shape = twin_shape(preset(twin.model.preset))
    model = build_model(twin, shape)
    base = Transformer(shape)
    base.init_weights(twin.seed)
    save_pretrained(base, folder / "base")  # adapters are for a model that is there
    points: list[float] = []
    trainer = Trainer(
        twin,
        parallelize(model, mesh, twin, partial(_fill, twin, folder / "base")),
        loader,
        lambda point: points.append(point.loss),
        folder / "checkpoints",
        folder / "diagnostics",
    )
    if twin.preference.needs_reference:
        use_reference(trainer, folder / "reference.npy")
    trainer.fit()
    return points


def _fill(recipe: Recipe, base: Path, model: Transformer) -> None:
    load_weights(model, base)
    fill_adapters(model, recipe)


def golden(name: str) -> Path:
    """Where a recipe's losses are kept."""
    return FOLDER / f"{name}.json"


def main(names: list[str]) -> None:
    """Write the losses of these recipes, or of all."""
    torch.set_num_threads(1)
    for name in names or shipped_recipes():
        with tempfile.TemporaryDirectory() as folder:
            found = losses(load_recipe(name), Path(folder))
        golden(name).write_text(json.dumps([round(loss, 7) for loss in found], indent=0) + "\n")
        print(f"{name}: {found[0]:.4f} ... {found[-1]:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
