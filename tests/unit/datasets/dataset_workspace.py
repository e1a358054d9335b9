"""A small workspace as *preprocess* and *validate* leave it, with real token shards."""

import hashlib
from pathlib import Path

import numpy as np
import yaml

from pipelines.core.storage import write_json, write_text
from pipelines.data.tokens.token_shards import ShardWriter
from pipelines.datasets.dvc_objects import hash_folder
from pipelines.recipe.recipe_files import dump_yaml, load_recipe
from pipelines.run.records import (
    DatasetRef,
    PreprocessRecord,
    Split,
    ValidateRecord,
    output_folder,
)
from pipelines.run.workspace import Run


def make_workspace(
    folder: Path,
    text: str,
    *overrides: str,
    name: str = "small",
    masked: bool = False,
    pairs: bool = False,
) -> Path:
    """A workspace whose dataset is called `name` and holds `text`, byte for byte."""
    preprocess = output_folder(folder, "preprocess")
    splits = {split: _split(preprocess, split, text, masked) for split in ("train", "validation")}
    write_text(preprocess / "documents/train.txt", text)
    write_json(preprocess / "stats.json", {"characters": len(text)})
    dataset = DatasetRef(vocab_size=257, pairs=pairs, **splits)
    PreprocessRecord(dataset=dataset, stats={"characters": len(text)}).write(folder)
    write_text(
        folder / "params.yaml", dump_yaml(load_recipe("debug", [f"data.name={name}", *overrides]))
    )
    facts = {
        "inputs": [{"path": "a", "bytes": len(text), "md5": hashlib.md5(text.encode()).hexdigest()}]
    }
    write_json(folder / "source.json", {"source": facts, "tokenizer": None})
    write_json(folder / "environment.json", {"extensions": {"preprocess": {}}})
    run = Run(dag_run_id=folder.name, git_commit="c" * 40, dirty=False, recipe_fingerprint="f" * 12)
    run.write(folder)
    validate(folder)
    return folder


def validate(folder: Path) -> None:
    """What the data gate and the stage cache write of data that passed."""
    ValidateRecord(expectations=3, data_docs="data_docs/index.html").write(folder)
    seen = {
        "path": "outputs/preprocess",
        "md5": hash_folder(output_folder(folder, "preprocess")).hash,
    }
    write_text(folder / "dvc.lock", yaml.safe_dump({"stages": {"validate": {"deps": [seen]}}}))


def _split(preprocess: Path, split: str, text: str, masked: bool) -> Split:
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.uint16)
    (preprocess / "tokens").mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(preprocess / "tokens" / f"{split}-00000", 257, masked=masked)
    writer.add(tokens, mask=np.ones(len(tokens), np.uint8) if masked else None)
    shard = writer.close()
    shard = shard.model_copy(update={"path": f"tokens/{shard.path}"})
    return Split(documents=1, bytes=len(text), tokens=len(tokens), shards=(shard,))
